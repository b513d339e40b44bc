"""Files made to hurt, each opened in a process of its own with limits; see `zygote`."""
