"""Files and folders of rows: JSON lines (`json_lines`), parquet and arrow (`arrow`), and the configurations and splits
of a folder (`folders`)."""
