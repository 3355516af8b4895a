"""``hpcrl images``: the sandbox images on this machine: build, ls, prune."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.errors import report_errors
from hpcrl.errors import UserError

if TYPE_CHECKING:
    from hpcrl.sandbox.image_cache import CachedImage

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

_DAY = 86400.0
_MIB = 1024 * 1024


@app.callback()
def _group() -> None:
    """Build, list and remove the sandbox images of this machine."""


@app.command()
@report_errors
def build(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[IMAGE…]",
            help="FILE.def, FILE.sif, docker-archive:FILE, Dockerfile, docker://NAME; default: the run's default image.",
        ),
    ] = None,
) -> None:
    """Build or unpack images, once each; prints their directories."""
    from hpcrl.config.sections import SandboxSection
    from hpcrl.sandbox.images import pull, resolve

    for name in names or [SandboxSection().image]:
        image = pull(name) if name.startswith("docker://") else resolve(name)
        print(image.path)


@app.command("ls")
@report_errors
def list_command(as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False) -> None:
    """Images in the cache, the last used first."""
    from rich.console import Console
    from rich.table import Table

    from hpcrl.sandbox.image_cache import cached_images
    from hpcrl.sandbox.images import cache_directory

    images = cached_images(cache_directory())
    if as_json:
        print(json.dumps([_as_dict(image) for image in images]))
        return
    table = Table("image", "made from", "MiB", "used", "")
    for image in images:
        table.add_row(
            image.key[:19],
            image.source,
            f"{image.size / _MIB:.0f}",
            f"{(time.time() - image.used_at) / _DAY:.1f} days ago",
            "in use" if image.in_use else "",
        )
    Console(width=None if Console().is_terminal else 200).print(table)
    print(
        f"{len(images)} images, {sum(image.size for image in images) / _MIB:.0f} MiB in {cache_directory() / 'images'}"
    )


@app.command()
@report_errors
def prune(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[IMAGE…]", help="Only these, by the begin of their names.")
    ] = None,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Only what was not used for so long.")
    ] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What was removed, as JSON.")] = False,
) -> None:
    """Remove images that nobody has used for some time. One in use is never taken."""
    from hpcrl.sandbox.image_cache import cached_images, prune
    from hpcrl.sandbox.images import cache_directory

    cache = cache_directory()
    chosen: list[str] = []
    for key in keys or []:
        found = [image.key for image in cached_images(cache) if image.key.startswith(key)]
        if not found:
            raise UserError(f"no image {key} in {cache / 'images'}; hpcrl images ls lists them")
        chosen += found
    removed = prune(cache, older_than * _DAY, tuple(chosen), dry_run)
    if as_json:
        print(json.dumps([_as_dict(image) for image in removed]))
        return
    for image in removed:
        print(f"{'would remove' if dry_run else 'removed'} {image.key} ({image.source}, {image.size / _MIB:.0f} MiB)")
    print(f"{len(removed)} images, {sum(image.size for image in removed) / _MIB:.0f} MiB")


def _as_dict(image: CachedImage) -> dict[str, object]:
    return {**asdict(image), "path": str(image.path)}
