"""The `kvcourier` command.

Reading path: `app.py` (commands, exit codes, how an error is shown), `config_file.py` (`--config`),
then one file per command. `instance.py` is where an embedded instance is put together;
`kvcourier.http_server` serves it, and the router.

Common changes: a new flag of `serve` goes through `serve.py` and `instance.py`; nothing else knows
flags. Heavy imports (torch, nixl) stay inside functions, so that `--help` answers at once.
"""
