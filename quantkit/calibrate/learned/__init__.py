"""Steps that learn by gradients."""
