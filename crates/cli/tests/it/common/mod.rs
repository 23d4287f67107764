//! Running the program and checking its results, shared by tests.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The command line of the built program, without input.
#[allow(dead_code, reason = "some tests run the program in other ways")]
pub(crate) fn command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
    command.args(args).env("LC_ALL", "C").env("TZ", "UTC").stdin(Stdio::null());
    command
}

/// Runs the built program with umask 022, because the model of other tests clears that of this process. It is killed if
/// it takes longer than two minutes.
#[allow(dead_code, reason = "some tests run the program in other ways")]
pub(crate) fn ubtrfs<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", "umask 022; exec timeout -k 5 120 \"$@\"", "sh", env!("CARGO_BIN_EXE_ubtrfs")]).args(args);
    command.env("LC_ALL", "C").env("TZ", "UTC").stdin(Stdio::null()).output().unwrap()
}

/// `unshare`, to which a test adds a program that runs in a mount namespace of its own. The namespace has no mounts of this
/// program and of loop devices, except those below `kept`: it would keep mounts of other tests, which run meanwhile, in
/// use.
#[allow(dead_code, reason = "only some tests use namespaces")]
pub(crate) fn namespace(kept: &Path) -> Command {
    namespace_with("private", kept)
}

/// Works like [`namespace`], with this propagation of mounts from here.
#[allow(dead_code, reason = "only some tests use namespaces")]
pub(crate) fn namespace_with(propagation: &str, kept: &Path) -> Command {
    const DETACH_OTHERS: &str = r#"
        kept=$1; shift
        mounts=$(cat /proc/self/mountinfo)
        while read -r id parent device root point rest; do
            case "$point|$rest" in
                "$kept"/*|"$kept|"*) ;;
                *" - fuse.ubtrfs "*|*" - btrfs /dev/loop"*) umount -i -l "$point" ;;
            esac
        done <<END
$mounts
END
        exec "$@""#;
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", propagation, "sh", "-c", DETACH_OTHERS, "sh"]).arg(kept);
    command
}

/// Words that run a command as the user nobody, without capabilities.
#[allow(dead_code, reason = "only some tests act as another user")]
pub(crate) const NOBODY: &[&str] = &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"];

/// A path as text.
#[allow(dead_code, reason = "some tests run the program in other ways")]
pub(crate) fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Returns the output of a command, which must have succeeded.
#[allow(dead_code, reason = "some tests check results in other ways")]
#[track_caller]
pub(crate) fn ok(output: impl Borrow<Output>) -> String {
    let output = output.borrow();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(stderr, "", "nothing is said without a reason");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Fails unless the command failed with a one-line error that contains these words.
#[allow(dead_code, reason = "some tests check results in other ways")]
#[track_caller]
pub(crate) fn refused(output: &Output, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    // For wrong arguments, the error is followed by tips, the usage and a hint to the help.
    let is_usage = stderr.trim_end().lines().last().is_some_and(|line| line.starts_with("For more, see: ubtrfs"));
    assert!(is_usage || stderr.trim_end().lines().count() == 1, "one line: {stderr}");
    assert!(stderr.starts_with("ubtrfs: "), "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "'{word}' is missing: {stderr}");
    }
}

/// Finds the server of a mount: the process whose arguments contain `--serve` and the mount point.
#[allow(dead_code, reason = "only some tests look for servers")]
pub(crate) fn server_of(dir: &Path) -> u32 {
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(line) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let words: Vec<&[u8]> = line.split(|&byte| byte == 0).collect();
        if words.contains(&&b"--serve"[..]) && words.contains(&dir.as_os_str().as_encoded_bytes()) {
            return pid;
        }
    }
    panic!("no server for {}", dir.display());
}

/// Sets the mode of /dev/fuse that udev sets, because fusermount3 opens the device as the user.
#[allow(dead_code, reason = "only some tests mount as another user")]
pub(crate) fn let_users_mount() {
    use std::os::unix::fs::PermissionsExt;
    let device = std::fs::metadata("/dev/fuse").unwrap().permissions();
    if device.mode() & 0o006 != 0o006 {
        eprintln!("making /dev/fuse accessible to everyone, as udev does");
        std::fs::set_permissions("/dev/fuse", std::fs::Permissions::from_mode(0o666)).unwrap();
    }
}

/// Returns the names of all commands and subcommands, from the program's help.
#[allow(dead_code, reason = "only some tests run every command")]
pub(crate) fn all_commands() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut todo = vec![String::new()];
    while let Some(group) = todo.pop() {
        let help = command(group.split_whitespace()).arg("--help").output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        let Some((_, list)) = help.split_once("Commands:\n") else {
            found.insert(group.trim().to_owned());
            continue;
        };
        for line in list.lines().take_while(|line| !line.is_empty()).filter(|line| line.starts_with("  ")) {
            let name = line[2..].split(' ').next().unwrap();
            if !name.is_empty() && name != "help" {
                todo.push(format!("{group} {name}"));
            }
        }
    }
    found
}

/// Runs the program in a directory on a terminal: waits for each text, then types the keys. The result has the program's
/// status and no output. Needs python3.
pub(crate) fn on_terminal(dir: &Path, args: &[&str], steps: &[(&str, &str)]) -> Output {
    const TERMINAL: &str = r#"
import fcntl, json, os, pty, select, struct, sys, termios, time
program, args, steps = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
pid, fd = pty.fork()
if pid == 0:
    os.environ["TERM"] = "xterm"
    os.execv(program, ["ubtrfs"] + args)
fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
seen, sent = b"", ""
for text, keys in steps:
    text, end, pause = text.encode(), time.time() + 60, time.time() + 2
    while text not in seen:
        if time.time() > end:
            raise SystemExit(f"no {text!r} in {seen!r}")
        # A command that has not begun does not see Ctrl-C.
        if sent == "\x03" and time.time() > pause:
            pause = time.time() + 2
            os.write(fd, b"\x03")
        if select.select([fd], [], [], 0.1)[0]:
            try:
                seen += os.read(fd, 4096)
            except OSError:
                raise SystemExit(f"the program ended before {text!r}: {seen!r}")
    seen = seen.split(text, 1)[1]
    os.write(fd, keys.encode())
    sent = keys or sent
while True:
    try:
        if not os.read(fd, 4096):
            break
    except OSError:
        break
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"#;
    let (args, steps) = (serde_json::to_string(args).unwrap(), serde_json::to_string(steps).unwrap());
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "120", "python3", "-c", TERMINAL, env!("CARGO_BIN_EXE_ubtrfs"), &args, &steps]);
    command.current_dir(dir).output().unwrap()
}
