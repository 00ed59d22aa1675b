"""First process of the machine, and the set-up of its devices."""

from __future__ import annotations

from typing import Final

CABLES: Final = (
    ("rxe0@10.98.0.1", "rxe1@10.98.0.2"),
    ("rxe2@10.98.1.1", "rxe3@10.98.1.2"),
)
"""The devices at the ends of each cable, with the addresses of their interfaces (`veth0` to `veth3`)."""
DEVICES_VARIABLE: Final = "ZBMD_RDMA_DEVICES"
"""In the machine's environment: DEVICE@ADDRESS of the first cable's devices, with a comma."""
PACKAGES_FOLDER: Final = "packages"
"""Files below it overlay the host's files in the machine."""
PYTHON_FOLDER: Final = "opt/rdma/python"
"""Path of pyverbs in the machine, relative to the root."""
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

# Both ends of a cable are in one namespace, so what goes from one to the other would be taken for local
# and never reach the cable: hence rules of their own, ahead of the local table.
_CABLE: Final = """
set -e
ip rule add pref 100 lookup local
ip rule delete pref 0
cross() {
    ip route add "$2" dev "$3" src "$1" table "$4"
    ip rule add pref "$4" from "$1" to "$2" iif lo lookup "$4"
    ip neighbour replace "$2" lladdr "$(cat "/sys/class/net/$5/address")" dev "$3" nud permanent
}
cable() {
    ip link add "veth$1" type veth peer name "veth$3"
    ip address add "$2/24" dev "veth$1"
    ip address add "$4/24" dev "veth$3"
    for end in "$1" "$3"; do
        ip link set "veth$end" mtu 4500 up
        echo 1 >"/proc/sys/net/ipv4/conf/veth$end/accept_local"
        echo 0 >"/proc/sys/net/ipv4/conf/veth$end/rp_filter"
        echo 1 >"/proc/sys/net/ipv4/conf/veth$end/arp_ignore"
    done
    cross "$2" "$4" "veth$1" "$((51 + $1))" "veth$3"
    cross "$4" "$2" "veth$3" "$((51 + $3))" "veth$1"
    rdma link add "rxe$1" type rxe netdev "veth$1"
    rdma link add "rxe$3" type rxe netdev "veth$3"
}
echo 1 >/proc/sys/net/ipv4/conf/all/accept_local
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
"""


def network() -> str:
    """Lays the cables, in the machine's shell, and prints the first one's devices."""
    lines = [_CABLE]
    for ends in CABLES:
        words = [word for end in ends for word in end.removeprefix("rxe").split("@")]
        lines.append(f"cable {' '.join(words)}")
    lines += [
        "set +e",
        "ulimit -l unlimited",
        f"export {DEVICES_VARIABLE}={','.join(CABLES[0])}",
        f"export PYTHONPATH=/{PYTHON_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}",
    ]
    return "\n".join(lines)
