"""The commands `fastclip data index` and `fastclip data check`: they print what the data layer finds."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from fastclip.terminal import console, progress, say
from fastclip.text import counted

if TYPE_CHECKING:
    from fastclip.data.manifest import Manifest

_SHOWN = 20  # pairs that the index skipped
_MANY_EQUAL = 0.01  # share of repeated captions above which distinct negatives may help


def index(
    path: list[str] | str,
    image_column: str | None = None,
    caption_column: str | None = None,
    encoding: str = "utf-8",
    verify: bool = False,
    json: bool = False,
) -> None:
    """Index a collection in one pass over its headers. Training does this automatically if needed.

    Args:
        path: tar shards (braces and globs too), a CSV, TSV or Parquet table, a folder, or a [list, of, them].
        image_column: name of a table's image column, if it is not a common one.
        caption_column: name of a table's caption column, if it is not a common one.
        encoding: of tables and captions, e.g. cp1252 or latin-1.
        verify: read every caption and image, and compare them with what was indexed.
        json: print JSON instead of text.
    """
    manifest = _open(path, image_column, caption_column, encoding)
    pairs, files, skipped = len(manifest), len(manifest.files), manifest.problem_counts
    fingerprint, extra = manifest.fingerprint, manifest.extra_captions
    first = [str(problem) for problem in islice(manifest.problems(), _SHOWN)]
    verified = _verify(manifest) if verify else {}
    if json:
        summary = {"pairs": pairs, "files": files, "left_out": skipped, "first_left_out": first}
        summary |= {"fingerprint": fingerprint}
        print(dumps(summary | {"extra_captions": extra._asdict()} | verified, indent=2))
        return
    covers = "all captions and a sample of images" if manifest.images_sampled else "all captions and images"
    say(f"{counted(pairs, 'pair')} in {counted(files, 'file')}, fingerprint {fingerprint} ({covers})")
    if verified:
        say(f"verified: every caption and image {verified['verified']}")
    for reason, count in skipped.items():
        say(f"skipped: {count:,} × {reason}")
    for line in first:
        say(f"  {line}")
    if extra.pairs:
        say(f"{extra}.")


def check(
    path: list[str] | str,
    config: str | None = None,
    tokenizer: str | None = None,
    sheet: Path = Path("pairs.png"),
    limit: int | None = None,
    jobs: int | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    encoding: str = "utf-8",
    formats: str | None = None,
    json: bool = False,
) -> None:
    """Check a collection: read and decode its pairs, count problems, and draw a contact sheet.

    Args:
        path: as for `fastclip data index`.
        config: a recipe's name, or a YAML file: its model's tokenizer and context length count the captions
            that training will truncate.
        tokenizer: a model whose tokenizer to use instead. Default: the config's, or else ViT-B-32.
        sheet: PNG file for the contact sheet.
        limit: check only this many pairs, evenly spread. Default: all.
        jobs: processes that decode. Default: one per core.
        image_column: name of a table's image column, if it is not a common one.
        caption_column: name of a table's caption column, if it is not a common one.
        encoding: of tables and captions, e.g. cp1252 or latin-1.
        formats: image formats to decode besides JPEG, PNG, WebP, GIF, BMP and TIFF, separated by commas:
            avif, jpeg2000, ppm. Default: the config's.
        json: print JSON instead of a table.
    """
    from open_clip.tokenizer import HFTokenizer

    from fastclip.config.options import TrainConfig, split_formats
    from fastclip.config.parse import parse
    from fastclip.data import check_collection
    from fastclip.data.decode import Augment
    from fastclip.model import find_model
    from fastclip.model_config import get_tokenizer
    from fastclip.towers.design import Parts, design
    from fastclip.towers.hf_text import CountingTokenizer

    asked = parse(["--config", config]) if config else TrainConfig()
    accepted = split_formats("formats", formats or asked.data.formats)
    words = (
        get_tokenizer(tokenizer)
        if tokenizer
        else design(find_model(asked.model.name), Parts.of(asked.model)).tokenizer()
    )
    encode = CountingTokenizer(words, words.context_length) if isinstance(words, HFTokenizer) else words
    manifest = _open(path, image_column, caption_column, encoding)
    with progress("checking", "pairs") as update:
        augment = Augment(formats=accepted)
        report = check_collection.check(
            manifest, encode, limit=limit, jobs=jobs, augment=augment, progress=update
        )
    check_collection.contact_sheet(manifest, sheet, formats=accepted)
    if json:
        print(dumps(asdict(report) | {"sheet": str(sheet)}, indent=2))
    else:
        _print_report(report, sheet)


def _open(
    path: list[str] | str, image_column: str | None, caption_column: str | None, encoding: str
) -> Manifest:
    from fastclip.config.options import check_encoding
    from fastclip.data.manifest import open_manifest
    from fastclip.data.pairs import Columns

    check_encoding("encoding", encoding)
    columns = Columns(image_column, caption_column, encoding)
    with progress("indexing", "bytes") as update:
        return open_manifest(path, columns, progress=update)


def _verify(manifest: Manifest) -> dict[str, str]:
    """Read everything; PathError if anything differs from what was indexed."""
    from fastclip.data.fingerprint import verify
    from fastclip.errors import PathError

    with progress("verifying", "parts") as update:
        found = verify(manifest, update)
    if found.changed:
        more = len(found.changed) - 1
        raise PathError(
            found.changed[0].file,
            f"differs from what was indexed, in {found.changed[0].where}{f'; {more:,} more' * (more > 0)}. "
            "Restore the files from a copy; if they are right as they are, touch them to index them again.",
        )
    return {"verified": "matches the index" if found.images_were_known else "is recorded, the sample matches"}


def _print_report(report, sheet: Path) -> None:
    from rich.table import Table

    def spread(quantiles: dict[str, float], unit: str) -> str:
        values = ", ".join(f"{name} {value:g}" for name, value in quantiles.items())
        return f"{values} {unit}" if values else "–"

    def counts(numbers: dict[str, int]) -> str:
        return "; ".join(f"{count:,} × {name}" for name, count in numbers.items()) or "none"

    truncated = "unknown" if report.truncated_captions is None else f"{report.truncated_captions:,}"
    state = ", ".join(f"{name} {mib:g} MiB" for name, mib in report.state_mib.items() if mib)
    several = report.extra_captions
    speed = "–"
    if report.hours_per_epoch_per_core is not None:
        speed = f"{report.images_per_second_per_core:,.0f} images/s per core, "
        speed += f"{report.hours_per_epoch_per_core:.2g} core-hours per epoch"
    padding = ""
    if report.padding is not None:
        padding = f"; {report.padding:.0%} of {report.context_length} positions are padding"
    captions = f"{report.same_caption:,}"
    if report.same_caption > _MANY_EQUAL * max(1, report.looked_at):
        captions += "; consider `fastclip train --loss.negatives distinct`"
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "pairs": f"{report.pairs:,}, {report.looked_at:,} of them checked",
        "skipped by the index": counts(report.left_out),
        "unreadable": counts(report.unreadable),
        "worst files": counts(report.worst_files),
        "same image as an earlier pair": f"{report.same_image:,} ({report.same_pair:,} with its caption)",
        "same caption as an earlier pair": captions,
        "images with several captions": f"{several['pairs']:,} ({several['captions']:,} beyond the first)",
        "caption length": spread(report.caption_words, "words"),
        "caption tokens": spread(report.caption_tokens, "tokens") + padding,
        "captions truncated": f"{truncated} (> {report.context_length} tokens)",
        "image width": spread(report.width, "px"),
        "image height": spread(report.height, "px"),
        "formats": counts(report.formats),
        "decoding": speed,
        "sample state, all ranks": state or "less than 0.01 MiB",
        "contact sheet": str(sheet),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console().print(table)
    for line in report.first_bad:
        say(f"  {line}")
