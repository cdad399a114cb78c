"""The page itself, in gradio: three tabs over the same answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

from fastclip.tools.demo.answers import Answers
from fastclip.tools.demo.cards import draw_note, escape
from fastclip.tools.demo.limits import MAX_BYTES, MAX_LABELS, MAX_LETTERS, MAX_TOP, Refused
from fastclip.tools.demo.server import Guard
from fastclip.tools.search.index import Index

_QUEUE = 32  # questions that wait; one more is told to come back
_FORGET = (60, 900)  # look every minute for uploads that are older than a quarter of an hour
_TOPS = (12, 24, MAX_TOP)
_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")


def build_app(index: Index, title: str, folder: Path, host: str) -> Guard:
    """The page behind the guard, as an ASGI application; files go into `folder`, of temporary_folder()."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    page = build_page(Answers(index, folder), title)
    css, js = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    off = ("run_history", "show_error", "ssr_mode", "mcp_server", "pwa", "enable_monitoring")
    options: dict[str, Any] = dict.fromkeys(off, False) | {"footer_links": [], "max_file_size": MAX_BYTES}
    gr.mount_gradio_app(app, page, "/", server_name=host, theme=_theme(), css=css, js=js, **options)
    return Guard(app, folder, host)


def build_page(answers: Answers, title: str) -> gr.Blocks:
    """The page, not yet served; `title` names the model and the pictures."""
    with gr.Blocks(title="fastclip demo", analytics_enabled=False, delete_cache=_FORGET) as page:
        gr.HTML(f"<header><h1>fastclip</h1><p>{escape(title)}</p></header>", elem_id="title")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Find pictures", id="pictures"):
                _pictures_tab(answers)
            with gr.Tab("Find captions", id="captions"):
                _captions_tab(answers)
            with gr.Tab("Classify", id="classify"):
                _classify_tab(answers)
    for block in page.blocks.values():
        _take_uploads_only(block, answers.uploads)
    page.queue(max_size=_QUEUE, api_open=False)
    return page


def _take_uploads_only(block: Any, folder: Path) -> None:
    """A question may name a file in place of any value: gradio would copy it to where it can be fetched, from
    anywhere on this machine, or get it from the address that it names.

    (Subclasses would say this more plainly, but gradio writes a .pyi beside the source of each.)
    """
    move = block.async_move_resource_to_block_cache

    async def move_upload(path: str | Path | None) -> str | None:
        if path is not None and not Path(path).resolve().is_relative_to(folder.resolve()):
            raise gr.Error("Only pictures that were uploaded here can be used.", print_exception=False)
        return await move(path)

    block.async_move_resource_to_block_cache = move_upload


def _theme() -> gr.themes.Base:
    """Fonts of the system: nothing is asked from elsewhere."""
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


def _pictures_tab(answers: Answers) -> None:
    examples = answers.examples()
    with gr.Row(elem_classes="ask"):
        query = gr.Textbox(
            label="What should the pictures show?",
            placeholder=examples[0] if examples else "a red heart",
            max_length=MAX_LETTERS,
            max_lines=1,
            elem_id="query",
            scale=1,
        )
        search = gr.Button("Search", variant="primary", elem_id="search", scale=0, min_width=110)
    with gr.Row(elem_classes="try"):
        buttons = [gr.Button(text, size="sm", elem_classes="example", scale=0) for text in examples]
    with gr.Row(elem_classes="above"):
        note = gr.HTML(draw_note("Press / to type, Enter to search."), elem_id="found-note")
        plain: dict[str, Any] = {"show_label": False, "container": False}
        top = gr.Radio(list(_TOPS), value=_TOPS[0], elem_id="top", elem_classes="top", **plain)
    found = gr.HTML(elem_id="found", elem_classes="results")

    def ask(text: str, top: int) -> tuple[str, Any]:
        started = time.perf_counter()
        try:
            found = answers.pictures(text, top)
        except Refused as refusal:  # earlier results stay where they are
            return draw_note(str(refusal), wrong=True), gr.skip()
        took = 1000 * (time.perf_counter() - started)
        return draw_note(f"Pictures that fit best, with their cosines · {took:.0f} ms"), found

    inputs, outputs = [query, top], [note, found]
    for event in (query.submit, search.click, top.input):
        _on(event, ask, inputs, outputs)
    for button in buttons:
        filled = button.click(None, button, query, js="(text) => text", api_visibility="private")
        _on(filled.then, ask, inputs, outputs)


def _captions_tab(answers: Answers) -> None:
    with gr.Row(elem_classes="look"):
        picture = _picture_field("caption-picture")
        with gr.Column(elem_classes="beside"):
            note = gr.HTML(draw_note("The nearest captions come here."), elem_id="captions-note")
            captions = gr.HTML(elem_id="captions", elem_classes="results")
    like_note = gr.HTML("", elem_id="like-note")
    like = gr.HTML(elem_id="like", elem_classes="results")

    def ask(upload: Any) -> tuple[str, str, str, str]:
        if upload is None:  # the picture was taken away again
            return draw_note("The nearest captions come here."), "", "", ""
        try:
            captions, pictures = answers.captions_and_pictures(upload, _TOPS[0])
        except Refused as refusal:
            return draw_note(str(refusal), wrong=True), "", "", ""
        fit = "Captions that fit best, with their cosines"
        note = draw_note(fit if captions else "These pictures have no captions.")
        return note, captions, draw_note("Pictures most like it"), pictures

    _on(picture.change, ask, [picture], [note, captions, like_note, like], preprocess=False)


def _classify_tab(answers: Answers) -> None:
    with gr.Row(elem_classes="look"):
        picture = _picture_field("classify-picture")
        with gr.Column(elem_classes="beside"):
            labels = gr.Textbox(
                ", ".join(answers.examples()),
                label=f"Labels, separated by commas or line ends (up to {MAX_LABELS})",
                placeholder="cat, dog, bird",
                lines=1,
                max_lines=8,
                elem_id="labels",
            )
            button = gr.Button("Classify", variant="primary", elem_id="classify")
            note = gr.HTML(draw_note("Each label's probability comes here."), elem_id="classify-note")
            off: dict[str, Any] = dict.fromkeys(("show_label", "show_heading", "container", "visible"), False)
            bars = gr.Label(elem_id="bars", **off)

    def ask(upload: Any, labels: str) -> tuple[str, Any]:
        try:
            found = answers.probabilities(upload, labels)
        except Refused as refusal:
            return draw_note(str(refusal), wrong=True), gr.skip()
        note = draw_note("Probabilities of the labels, at the model's own temperature")
        return note, gr.Label(found, visible=True)

    for event in (picture.upload, labels.submit, button.click):
        _on(event, ask, [picture, labels], [note, bars], preprocess=False)


def _picture_field(name: str) -> gr.Image:
    return gr.Image(
        label="Picture",
        sources=["upload"],
        height=280,
        buttons=[],
        placeholder="Drop or paste a picture\n– or –\nclick to choose a file",
        elem_id=name,
        scale=0,
        min_width=300,
    )


def _on(event: Callable, ask: Callable, inputs: list, outputs: list, preprocess: bool = True) -> None:
    """One question at a time, whoever asks: there is one model. Results stay while the next come.

    Without `preprocess` the picture comes as it was uploaded; gradio would decode it before it is checked.
    """
    quiet = {"show_progress": "hidden", "api_visibility": "private"}
    event(ask, inputs, outputs, preprocess=preprocess, concurrency_limit=1, concurrency_id="model", **quiet)
