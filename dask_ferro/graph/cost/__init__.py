"""What nodes cost: FLOPs and bytes, and from them seconds on a device."""
