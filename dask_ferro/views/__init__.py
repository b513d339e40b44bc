"""Pages of the dashboard, cells of notebooks, files for Perfetto, tables of the terminal: views of computed values."""
