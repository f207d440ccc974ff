"""Everything that quantkit changes of transformers and accelerate, and how each change is undone: `table`."""
