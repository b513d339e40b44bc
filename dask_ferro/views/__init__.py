"""Pictures and tables of what others computed."""
