"""Who writes and reads what, decided purely: values in, values out, no disk and no torch."""
