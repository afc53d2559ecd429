"""Files and folders of rows: parquet and arrow, the configurations and splits of a folder."""
