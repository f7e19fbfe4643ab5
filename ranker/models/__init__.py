"""Scorers, one file each: `monobert` reads query and doc together, `dpr` and `colbert` encode them separately."""
