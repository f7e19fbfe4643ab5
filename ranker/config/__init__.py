"""Configuration: `roots` has the keys, `check` calls all checks, `stored` reads untrusted files."""
