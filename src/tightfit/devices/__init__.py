"""The seam between tightfit and hardware: copies, counters and waits, one class for each kind of device.

Takes tensors and names of devices, returns tensors and numbers; never decides anything. No other folder
may touch `torch.cuda`.
"""
