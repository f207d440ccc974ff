"""Present what `eval` and `bench` measured: documents, tables and plots."""
