#!/bin/sh
# Make sure that MuJoCo can draw: if no OpenGL works, install Mesa's through apt, or say what to install.
# Never fails: everything but images works without.
python=$1
packages="libegl1 libgl1-mesa-dri libosmesa6"

works() {
    for backend in ${MUJOCO_GL:-egl osmesa}; do
        MUJOCO_GL=$backend "$python" -c 'import mujoco; mujoco.GLContext(8, 8).free()' >/dev/null 2>&1 && return 0
    done
    return 1
}

works && exit 0
sudo=
[ "$(id -u)" = 0 ] || sudo="sudo -n"
if command -v apt-get >/dev/null 2>&1 && { [ -z "$sudo" ] || sudo -n true 2>/dev/null; }; then
    echo "No OpenGL found: installing Mesa's ($packages)"
    $sudo apt-get update -qq >/dev/null
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $packages >/dev/null
    works && exit 0
fi
echo "No OpenGL works here, so nothing can be drawn. On Debian or Ubuntu, install Mesa's:" >&2
echo "    apt-get install $packages" >&2
exit 0
