"""One agent per host: an xoscar actor that starts, watches and ends that host's processes."""
