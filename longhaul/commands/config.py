# SPDX-License-Identifier: Apache-2.0
"""`longhaul config`: the defaults of options, and the file that sets each."""

from longhaul.defaults import Options, defaults, files
from longhaul.options import Json, print_json
from longhaul.terminal.messages import note

WITHOUT = {
    "cluster": "dgx_h100 to plan for; `local` runs here",
    "account": "the cluster file's",
    "partition": "the cluster file's",
    "store": "stores/{card}",
    "out": "runs/{name}",
    "alert": "none",
    "track": "metrics.jsonl and TensorBoard alone",
}
"""Values of options that no file sets."""


def config(as_json: Json = False) -> None:
    """Show the defaults that longhaul.toml sets, here or in ~/.config/longhaul."""
    found = defaults()
    if as_json:
        print_json(
            {
                "defaults": {
                    name: {"value": one.value, "file": str(one.file)} for name, one in found.items()
                },
                "files": [str(path) for path in files()],
            }
        )
        return
    from rich.table import Table

    from longhaul.terminal.console import show

    table = Table("option", "value", "from", box=None, header_style="bold")
    for name in Options.__dataclass_fields__:
        one = found.get(name)
        if one is None:
            table.add_row(f"--{name}", WITHOUT[name], "Longhaul")
        else:
            table.add_row(f"--{name}", one.value, str(one.file))
    show(lambda _: table)
    if not found:
        here, own = files()
        note(f'no defaults are set; write them to {here} or {own}, such as cluster = "my.yaml"')
