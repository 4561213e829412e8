"""The process and its system: signals, threads, forks, memory, files in /proc."""
