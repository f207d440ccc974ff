"""Share packed layers between plug-ins of serving engines; they load a tensor of a checkpoint at a time."""
