"""Where sources and sinks are: files of a file system, and objects at addresses that fsspec reads."""
