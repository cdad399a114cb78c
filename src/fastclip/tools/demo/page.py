"""The page itself, in gradio: three tabs that search one index."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

from fastclip.tools.demo.answers import Answers
from fastclip.tools.demo.cards import draw_note, escape
from fastclip.tools.demo.guard import Guard, is_within
from fastclip.tools.demo.limits import (
    MAX_BYTES,
    MAX_CHARACTERS,
    MAX_LABELS,
    MAX_TOP,
    NOT_UPLOADED,
    RejectedInput,
)
from fastclip.tools.search.index import Index

_QUEUE = 32  # requests that may wait; further ones are rejected
_DELETE_UPLOADS = (60, 900)  # every 60 s, those older than 15 min
_TOPS = (12, 24, MAX_TOP)
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def build_app(index: Index, title: str, folder: Path, host: str) -> Guard:
    """The page behind the guard, as an ASGI application; files go to `folder`, from temporary_folder()."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page = build_page(Answers(index, folder), title)
    css, js = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    off = ("run_history", "show_error", "ssr_mode", "mcp_server", "pwa", "enable_monitoring")
    options: dict[str, Any] = dict.fromkeys(off, False) | {"footer_links": [], "max_file_size": MAX_BYTES}
    gr.mount_gradio_app(app, page, "/", server_name=host, theme=_theme(), css=css, js=js, **options)
    calls = {  # without those that run in the browser alone
        number: [isinstance(field, gr.Image) for field in call.inputs]
        for number, call in page.fns.items()
        if call.fn is not None
    }
    return Guard(app, folder, host, calls)


def build_page(answers: Answers, title: str) -> gr.Blocks:
    """The page, not yet served; `title` describes the model and the images."""
    with gr.Blocks(title="fastclip demo", analytics_enabled=False, delete_cache=_DELETE_UPLOADS) as page:
        gr.HTML(f"<header><h1>fastclip</h1><p>{escape(title)}</p></header>", elem_id="title")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Find images", id="pictures"):
                _images_tab(answers)
            with gr.Tab("Find captions", id="captions"):
                _captions_tab(answers)
            with gr.Tab("Classify", id="classify"):
                _classify_tab(answers)
    for block in page.blocks.values():
        _accept_only_uploads(block, answers.uploads)
    page.queue(max_size=_QUEUE, api_open=False)
    return page


def _accept_only_uploads(block: Any, folder: Path) -> None:
    """Reject paths outside of the folder of uploads.

    A request may name a file or a URL in place of any value, and gradio would copy it to where it can be
    fetched. (A subclass would be plainer, but gradio writes a .pyi beside the source of each.)
    """
    move = block.async_move_resource_to_block_cache

    async def move_upload(path: str | Path | None) -> str | None:
        if path is not None and not (is_within(path, folder) and Path(path).is_file()):
            raise gr.Error(NOT_UPLOADED, print_exception=False)
        return await move(path)

    block.async_move_resource_to_block_cache = move_upload


def _theme() -> gr.themes.Base:
    """System fonts only, so that nothing is fetched from other sites."""
    return gr.themes.Base(
        primary_hue="blue",
        neutral_hue="slate",
        font=[gr.themes.Font(name) for name in _SANS],
        font_mono=[gr.themes.Font(name) for name in _MONO],
        radius_size="md",
    ).set(
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_400",
        color_accent="*primary_600",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
    )


def _images_tab(answers: Answers) -> None:
    examples = answers.examples()
    with gr.Row(elem_classes="ask"):
        query = gr.Textbox(
            label="What should the images show?",
            placeholder=examples[0] if examples else "a red heart",
            max_length=MAX_CHARACTERS,
            max_lines=1,
            elem_id="query",
            scale=1,
        )
        search = gr.Button("Search", variant="primary", elem_id="search", scale=0, min_width=110)
    with gr.Row(elem_classes="try"):
        buttons = [gr.Button(text, size="sm", elem_classes="example", scale=0) for text in examples]
    with gr.Row(elem_classes="above"):
        note = gr.HTML(draw_note("Press / to go to the search box, Enter to search."), elem_id="found-note")
        plain: dict[str, Any] = {"show_label": False, "container": False}
        top = gr.Radio(list(_TOPS), value=_TOPS[0], elem_id="top", elem_classes="top", **plain)
    results = gr.HTML(elem_id="found", elem_classes="results")

    def ask(text: str, top: int) -> tuple[str, Any]:
        started = time.perf_counter()
        try:
            images = answers.images(text, top)
        except RejectedInput as error:  # earlier results stay
            return draw_note(str(error), wrong=True), gr.skip()
        took = 1000 * (time.perf_counter() - started)
        return draw_note(f"Best matches, with cosine similarities · {took:.0f} ms"), images

    inputs, outputs = [query, top], [note, results]
    for event in (query.submit, search.click, top.input):
        _on(event, ask, inputs, outputs)
    for button in buttons:
        filled = button.click(None, button, query, js="(text) => text", api_visibility="private")
        _on(filled.then, ask, inputs, outputs)


def _captions_tab(answers: Answers) -> None:
    with gr.Row(elem_classes="look"):
        image = _image_field("caption-picture")
        with gr.Column(elem_classes="beside"):
            note = gr.HTML(draw_note("The best captions will appear here."), elem_id="captions-note")
            captions = gr.HTML(elem_id="captions", elem_classes="results")
    like_note = gr.HTML("", elem_id="like-note")
    like = gr.HTML(elem_id="like", elem_classes="results")

    def ask(upload: Any) -> tuple[str, str, str, str]:
        if upload is None:  # the image was removed again
            return draw_note("The best captions will appear here."), "", "", ""
        try:
            captions, images = answers.captions_and_images(upload, _TOPS[0])
        except RejectedInput as error:
            return draw_note(str(error), wrong=True), "", "", ""
        best = "Best captions, with cosine similarities"
        note = draw_note(best if captions else "The images have no captions to search.")
        return note, captions, draw_note("Most similar images, with cosine similarities"), images

    _on(image.change, ask, [image], [note, captions, like_note, like])


def _classify_tab(answers: Answers) -> None:
    with gr.Row(elem_classes="look"):
        image = _image_field("classify-picture")
        with gr.Column(elem_classes="beside"):
            labels = gr.Textbox(
                ", ".join(answers.examples()),
                label=f"Labels, separated by commas or line breaks (up to {MAX_LABELS})",
                placeholder="cat, dog, bird",
                lines=1,
                max_lines=8,
                elem_id="labels",
            )
            button = gr.Button("Classify", variant="primary", elem_id="classify")
            note = gr.HTML(
                draw_note("The probability of each label will appear here."), elem_id="classify-note"
            )
            off: dict[str, Any] = dict.fromkeys(("show_label", "show_heading", "container", "visible"), False)
            bars = gr.Label(elem_id="bars", **off)

    def ask(upload: Any, labels: str) -> tuple[str, Any]:
        try:
            probabilities = answers.probabilities(upload, labels)
        except RejectedInput as error:
            return draw_note(str(error), wrong=True), gr.skip()
        note = draw_note("Probabilities of the labels, at the model's temperature")
        return note, gr.Label(probabilities, visible=True)

    for event in (image.upload, labels.submit, button.click):
        _on(event, ask, [image, labels], [note, bars])


def _image_field(name: str) -> gr.Image:
    return gr.Image(
        label="Image",
        sources=["upload"],
        height=280,
        buttons=[],
        placeholder="Drop or paste an image\n– or –\nclick to choose a file",
        elem_id=name,
        scale=0,
        min_width=300,
    )


def _on(event: Callable, ask: Callable, inputs: list, outputs: list) -> None:
    """Handle one request at a time, as there is one model; old results stay until new ones arrive.

    Values arrive as they were sent (no `preprocess`): gradio would decode an image before it is checked.
    """
    quiet = {"show_progress": "hidden", "api_visibility": "private"}
    event(ask, inputs, outputs, preprocess=False, concurrency_limit=1, concurrency_id="model", **quiet)
