"""Archives of topics as Parquet: write, compact, replay."""
