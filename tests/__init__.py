"""Tests. A regular package, because gmqtt installs a package of this name, which would hide a folder."""
