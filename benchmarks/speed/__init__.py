"""Speed and memory on any device."""
