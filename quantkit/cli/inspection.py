"""`quantkit inspect`: what is in a packed checkpoint."""

from quantkit.cli import options
from quantkit.cli.console import note, print_json, say
from quantkit.cli.layers import print_layers, print_readers, totals


def inspect(
    directory: options.PackedDirectory,
    every_layer: options.EveryLayer = False,
    json: options.Json = False,
) -> None:
    """Show how a packed checkpoint stores each linear.

    Reads the manifest and headers only. "bits" counts every stored bit per weight, "error" is the squared
    error of the weights over their squares. With --json, prints the manifest.
    """
    from quantkit.checkpoint.manifest import read_manifest
    from quantkit.checkpoint.source import Checkpoint
    from quantkit.model.record import ModelRecord

    manifest = read_manifest(directory)
    record = ModelRecord.from_manifest(manifest)
    checkpoint = Checkpoint.open(directory)
    if json:
        print_json(manifest)
        return
    for warning in checkpoint.warnings:
        note(warning)
    made_by = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    say(f"made from {record.source} with {made_by}")
    print_layers(record.layers, record.dense, every_layer=every_layer)
    say(totals(record.source_bytes, checkpoint.nbytes, record.bits_per_weight))
    print_readers(record.container, record.needs_quantkit)
