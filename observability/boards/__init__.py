"""The dashboards, one file for each."""
