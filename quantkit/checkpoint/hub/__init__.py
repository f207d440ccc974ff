"""Ask the hub, and believe no answer that was not checked."""
