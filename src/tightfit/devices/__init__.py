"""The hardware interface of tightfit: copies, memory counters and synchronization, one class for each kind of device.

Takes tensors and device names, returns tensors and numbers; never makes planning decisions. No other folder
may use `torch.cuda`.
"""
