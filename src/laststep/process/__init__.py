"""What the process and its system give and take: signals, threads, forks, memory, files of /proc."""
