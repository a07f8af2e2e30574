"""Groupwise codes of 4 and 8 bits: integers and fp8, ZeRO++'s swizzle and reduction; import them from `dsx_ops`."""
