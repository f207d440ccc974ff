"""`quantkit inspect`: what is in a packed checkpoint."""

from quantkit.cli import options
from quantkit.cli.console import note, out, print_json
from quantkit.cli.layers import dense_summary, layer_table, totals


def inspect(
    directory: options.PackedDirectory,
    every_layer: options.EveryLayer = False,
    json: options.Json = False,
) -> None:
    """Show how every linear of DIRECTORY is stored, how well, and what stayed dense and why."""
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
    out.print(f"made from {record.source} with {made_by}")
    out.print(layer_table(record.layers, every_layer=every_layer))
    for line in dense_summary(record.dense):
        out.print(line)
    out.print(totals(record.source_bytes, checkpoint.nbytes, record.bits_per_weight))
    for reason in record.needs_quantkit[:1]:
        note(f"needs quantkit to load, compressed-tensors cannot express it: {reason}")
