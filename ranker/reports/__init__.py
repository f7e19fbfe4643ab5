"""Make `report.html`, a self-contained page of one or several runs; the numbers come from the files of the runs."""
