"""Files for other runtimes: each one is run and compared with PyTorch before it is written."""
