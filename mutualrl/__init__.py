"""Post-train several different language models together: command line, configuration, supervision, report."""
