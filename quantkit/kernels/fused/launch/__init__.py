"""From operands to launches: for each fused kernel its tiles, the rules for them, and its launch."""
