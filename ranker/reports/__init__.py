"""`report.html`: one self-contained page of a run or of several runs; the numbers come from the files of the runs."""
