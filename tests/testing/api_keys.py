"""Files of API keys for routers."""

from __future__ import annotations

from pathlib import Path

from quire.services.router.tenants.api_keys import Tenant, new_key


def write_keys(folder: Path, *tenants: Tenant) -> tuple[Path, list[str]]:
    """Write a file with a new key of each tenant; return it and the keys, in the order of the tenants."""
    made = [new_key(tenant) for tenant in tenants]
    file = folder / "keys"
    file.write_text("\n".join(key.line for key in made), "utf-8")
    return file, [key.key for key in made]
