"""Dashboard pages, reports and terminal tables; they draw values that other modules computed."""
