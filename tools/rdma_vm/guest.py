"""What runs inside the machine: its first process, and the set-up of its devices."""

from __future__ import annotations

from typing import Final

DEVICES: Final = ("rxe0", "rxe1")
ADDRESSES: Final = ("10.98.0.1", "10.98.0.2")
"""Of the interfaces of the two devices, which are the ends of one cable (`veth0`, `veth1`)."""
DEVICES_VARIABLE: Final = "ZBMD_RDMA_DEVICES"
"""In the machine's environment: DEVICE@ADDRESS of each, with commas."""
PACKAGES_FOLDER: Final = "packages"
"""What is below it lies over the host's files in the machine."""
PYTHON_FOLDER: Final = "opt/rdma/python"
"""Where pyverbs is in the machine, relative to the root."""
OUTPUT_PORT: Final = "zbmd.output"
RESULT_PORT: Final = "zbmd.result"
COMMAND_FILE: Final = "command"

INIT: Final = f"""#!/bin/busybox sh
# Becomes the host's file system, read-only, with packages and a scratch layer on top; runs one command in it.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do
    insmod "/modules/$module.ko" || echo "module $module cannot be loaded"
done </modules/order
port() {{
    for name in /sys/class/virtio-ports/*/name; do
        if [ "$(cat "$name")" = "$1" ]; then name=${{name%/name}}; echo "/dev/${{name##*/}}"; fi
    done
}}
output=$(port {OUTPUT_PORT})
result=$(port {RESULT_PORT})
mount -t 9p -o ro,cache=loose,trans=virtio,version=9p2000.L,msize=512000 host /host
mount -t tmpfs -o size=60% tmpfs /scratch
mkdir /scratch/upper /scratch/work
mount -t overlay -o lowerdir=/packages:/host,upperdir=/scratch/upper,workdir=/scratch/work overlay /system
mount -t proc proc /system/proc
mount -t sysfs sys /system/sys
mount --move /dev /system/dev
mkdir -p /system/dev/shm /system/dev/pts /system/run
mount -t tmpfs tmpfs /system/dev/shm
mount -t devpts devpts /system/dev/pts
mount -t tmpfs tmpfs /system/run
mount -t cgroup2 cgroup2 /system/sys/fs/cgroup
ip link set lo up
cp /{COMMAND_FILE} /system/run/{COMMAND_FILE}
read -r up _ </proc/uptime
echo "ready after $up s"
chroot /system /bin/bash /run/{COMMAND_FILE} </system/dev/null >"/system$output" 2>&1
code=$?
echo "exit $code" >"/system$result"
poweroff -f
"""

# Both ends of the cable are in one namespace, so what goes from one to the other would be taken for local
# and never reach the cable: hence rules of their own, ahead of the local table.
NETWORK: Final = f"""
set -e
ip link add veth0 type veth peer name veth1
ip address add {ADDRESSES[0]}/24 dev veth0
ip address add {ADDRESSES[1]}/24 dev veth1
for device in veth0 veth1; do ip link set $device mtu 4500 up; done
for device in all veth0 veth1; do
    echo 1 >/proc/sys/net/ipv4/conf/$device/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$device/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$device/arp_ignore
done
ip rule add pref 100 lookup local
ip rule delete pref 0
cross() {{
    ip route add "$2" dev "$3" src "$1" table "$4"
    ip rule add pref "$4" from "$1" to "$2" iif lo lookup "$4"
    ip neighbour replace "$2" lladdr "$(cat "/sys/class/net/$5/address")" dev "$3" nud permanent
}}
cross {ADDRESSES[0]} {ADDRESSES[1]} veth0 51 veth1
cross {ADDRESSES[1]} {ADDRESSES[0]} veth1 52 veth0
rdma link add {DEVICES[0]} type rxe netdev veth0
rdma link add {DEVICES[1]} type rxe netdev veth1
set +e
ulimit -l unlimited
export {DEVICES_VARIABLE}={DEVICES[0]}@{ADDRESSES[0]},{DEVICES[1]}@{ADDRESSES[1]}
export PYTHONPATH=/{PYTHON_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}
"""
