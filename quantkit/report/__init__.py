"""Reports for people: documents, tables and plots of what `eval` and `bench` measured."""
