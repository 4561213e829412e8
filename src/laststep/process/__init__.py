"""What the process and its system give: signals, threads, forks, memory, files of /proc."""
