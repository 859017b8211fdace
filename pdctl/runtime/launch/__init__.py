"""From `up` to `down`: starting everything in order, and ending it with proof."""
