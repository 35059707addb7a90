#!/bin/sh
# Make sure that MuJoCo can draw: if no OpenGL works, install Mesa's through apt, or say what to install.
# With "all" (what the tests want): if either EGL or OSMesa does not.
# Never fails: everything but images works without.
python=$1
wanted=${2:-any}
packages="libegl1 libgl1-mesa-dri libosmesa6"

draws() {
    MUJOCO_GL=$1 "$python" -c 'import mujoco; mujoco.GLContext(8, 8).free()' >/dev/null 2>&1
}

works() {
    if [ "$wanted" = all ]; then
        draws egl && draws osmesa
        return
    fi
    for backend in $("$python" -c 'from aioenv.rendering.backends import candidate_backends; print(*candidate_backends(None))'); do
        draws "$backend" && return 0
    done
    return 1
}

works && exit 0
sudo=
[ "$(id -u)" = 0 ] || sudo="sudo -n"
if command -v apt-get >/dev/null 2>&1 && { [ -z "$sudo" ] || sudo -n true 2>/dev/null; }; then
    echo "OpenGL is missing: installing Mesa's ($packages)"
    $sudo apt-get update -qq >/dev/null
    # `env`, since sudo does not hand on variables
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
    works && exit 0
fi
if [ "$wanted" = all ]; then
    echo "EGL or OSMesa does not work here, which the tests of rendering need. On Debian or Ubuntu, install Mesa's:" >&2
else
    echo "No OpenGL works here, so nothing can be drawn. On Debian or Ubuntu, install Mesa's:" >&2
fi
echo "    apt-get install $packages" >&2
exit 0
