//! Runs the files of `docs/examples`: containers, units of systemd, metrics, pushes, and a filesystem behind qemu-nbd.
//!
//! Method: each test reads a file and does what the file says with what the machine has. A container is a root directory
//! in user and mount namespaces of an ordinary user, with the program, its libraries and few other programs. A script
//! stands in for podman, and fails for options that it does not know. Units are verified by systemd-analyze, and their
//! commands are run with other paths. Ceph RBD is a file behind qemu-nbd. Nothing uses a network.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;
use ubtrfs_testkit::capability;

use crate::common::{NOBODY, let_users_mount, namespace, ok, text, ubtrfs};

#[test]
fn each_example_is_explained_and_each_script_runs() {
    let guide = |name: &str| fs::read_to_string(repository().join("docs/guide").join(name)).unwrap();
    let guide = guide("deploy.md") + &guide("install.md");
    for entry in fs::read_dir(examples()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(guide.contains(&format!("(../examples/{name})")), "no page of the guide explains {name}");
        let is_script = fs::read_to_string(&path).unwrap().starts_with("#!");
        assert_eq!(path.metadata().unwrap().mode() & 0o111 != 0, is_script, "{name}");
    }
}

#[test]
fn the_build_container_makes_equal_images_without_privileges() {
    if !user_namespaces() {
        return;
    }
    let bed = Bed::new();
    let tree = bed.make_dir("context/tree/etc");
    fs::write(tree.join("motd"), "hello from a container\n").unwrap();
    symlink(env!("CARGO_BIN_EXE_ubtrfs"), bed.path("context/ubtrfs")).unwrap();
    let container = bed.build("Containerfile.build", &[]);
    let image = container.root.join("disk.img");
    assert_eq!(fs::read_dir(&container.root).unwrap().count(), 1, "the last stage has only the image");
    assert_eq!(ok(ubtrfs(["cat", &format!("{}:/etc/motd", text(&image))])), "hello from a container\n");
    let owner = ok(ubtrfs(["stat", "--json", &format!("{}:/etc/motd", text(&image))]));
    let owner: serde_json::Value = serde_json::from_str(&owner).unwrap();
    let owner = owner.as_array().map_or(&owner, |all| &all[0]);
    assert!(owner["uid"] == 0 && owner["gid"] == 0, "{owner}");
    let again = bed.build("Containerfile.build", &[]).root.join("disk.img");
    assert!(fs::read(&image).unwrap() == fs::read(&again).unwrap(), "equal trees give equal images");
}

#[test]
fn a_container_mounts_an_image_for_another_container() {
    if !capability::fuse() || !user_namespaces() {
        return;
    }
    if rustix::process::geteuid().is_root() {
        let_users_mount();
    }
    let bed = Bed::new();
    bed.make_dir("context");
    symlink(env!("CARGO_BIN_EXE_ubtrfs"), bed.path("context/ubtrfs")).unwrap();
    let container = bed.build("Containerfile.mount", &["sh", "cat", "setpriv"]);
    // Where podman puts volumes and devices.
    for dir in ["dev", "shared"] {
        fs::create_dir_all(container.root.join(dir)).unwrap();
    }
    for file in ["disk.img", "dev/fuse", "dev/null"] {
        fs::write(container.root.join(file), "").unwrap();
    }
    for (name, words) in [("localhost/ubtrfs-mount", &container), ("reader", &Container::default())] {
        let dir = bed.make_dir(&format!("images/{name}"));
        fs::write(dir.join("entrypoint"), words.entrypoint.join("\n")).unwrap();
        fs::write(dir.join("cmd"), words.cmd.join("\n")).unwrap();
        fs::write(dir.join("signal"), &words.stop_signal).unwrap();
        symlink(&container.root, dir.join("root")).unwrap();
    }
    bed.script("bin/podman", PODMAN);

    let image = bed.path("disk.img");
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", "--root-owner", "0:0", &text(&image)]));
    ok(ubtrfs(["touch", &format!("{}:/before", text(&image))]));
    bed.give_to_user(&image);
    let words = "echo \"$(cd /shared/disk && echo *)\" && echo hello >/shared/disk/after && cat /shared/disk/after";
    let shown = bed.mount_beside(&image, words);
    assert!(shown.status.success(), "{shown:?}");
    assert_eq!(String::from_utf8_lossy(&shown.stdout), "before\nhello\n", "{shown:?}");
    assert!(!String::from_utf8_lossy(&shown.stderr).contains("ERROR"), "{shown:?}");
    // The image is closed, and nothing is left.
    assert_eq!(ok(ubtrfs(["cat", &format!("{}:/after", text(&image))])), "hello\n");
    assert!(ok(ubtrfs(["check", "--check-data-csum", &text(&image)])).contains("clean"));
    assert_eq!(fs::read_dir(bed.path("tmp")).unwrap().count(), 0);
    assert_eq!(fs::read_to_string(bed.path("running")).unwrap(), "");

    // The status of the command is that of the script.
    assert_eq!(bed.mount_beside(&image, "exit 7").status.code(), Some(7));
    // The log of the first container says why there is no mount.
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let refused = bed.mount_beside(&image, "echo never");
    assert!(!refused.status.success() && refused.stdout.is_empty(), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("ubtrfs: "), "{refused:?}");
}

#[test]
fn systemd_accepts_the_units() {
    if !capability::program("systemd-analyze") {
        return;
    }
    let bed = Bed::new();
    let dir = bed.make_dir("units");
    let mut names = Vec::new();
    for entry in fs::read_dir(examples()).unwrap() {
        let path = entry.unwrap().path();
        let mut unit = fs::read_to_string(&path).unwrap();
        if !unit.contains("\n[Unit]\n") {
            continue;
        }
        let kind = path.extension().and_then(|kind| kind.to_str());
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if kind == Some("service") {
            // systemd looks for programs where this test does not install them.
            let program = command_of(&unit)[0].clone();
            let installed = bed.path(&format!("bin/{program}"));
            let script = examples().join(&program);
            let from = if script.exists() { script } else { PathBuf::from("/bin/true") };
            symlink(from, &installed).unwrap();
            unit = unit.replace(&format!("ExecStart={program} "), &format!("ExecStart={} ", text(&installed)));
        }
        if kind == Some("timer") {
            assert!(path.with_extension("service").exists(), "{name} starts a service of the same name");
        }
        fs::write(dir.join(&name), unit).unwrap();
        names.push(name);
    }
    assert!(names.len() >= 7, "{names:?}");
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "60", "systemd-analyze", "verify", "--man=no", "--recursive-errors=no"]);
    let verified = command.args(names.iter().map(|name| dir.join(name))).output().unwrap();
    let said = String::from_utf8_lossy(&verified.stderr);
    assert!(verified.status.success(), "{said}");
    // Unknown keys are only warnings. Units of this machine may have warnings too.
    let about: Vec<&str> = said.lines().filter(|line| names.iter().any(|name| line.contains(name.as_str()))).collect();
    assert!(about.is_empty(), "{about:#?}");
}

#[test]
fn metrics_of_all_mounts_are_valid_also_while_a_mount_vanishes() {
    // Other mounts of this machine are detached in a mount namespace.
    if !capability::root() || !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    for dir in ["out", "theirs", "a 1\"b\\c", "gone", "other", "nested"] {
        bed.make_dir(dir);
    }
    fs::set_permissions(bed.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    symlink(command_script("ubtrfs-metrics.service"), bed.path("bin/ubtrfs-metrics")).unwrap();
    // The mount `gone` is unmounted after it was listed.
    let vanish =
        "#!/bin/sh\ncase \"$*\" in \"stats --prometheus \"*/gone) PROGRAM umount \"$3\" ;; esac\nexec PROGRAM \"$@\"\n";
    bed.script("bin/ubtrfs", &vanish.replace("PROGRAM", env!("CARGO_BIN_EXE_ubtrfs")));
    let steps = r#"
        set -eu
        ubtrfs mount --create 256M a.img 'a 1"b\c'
        ubtrfs mount --create 256M b.img gone
        ubtrfs subvolume create 'a 1"b\c/sub' >made
        # A further subvolume, a submount and a bind mount are no filesystems of their own.
        ubtrfs mount -o subvol=sub a.img other
        ubtrfs mount -o submounts --create 256M c.img nested
        ubtrfs subvolume create nested/sub >>made
        ls nested/sub
        mkdir bound && mount --bind 'a 1"b\c' bound
        ubtrfs-metrics out 2>said
        ln out/ubtrfs.prom first
        ubtrfs-metrics out 2>>said
        umount bound
        ubtrfs umount other
        ubtrfs umount nested
        ubtrfs umount 'a 1"b\c'
        cp out/ubtrfs.prom second
        ubtrfs-metrics out
        echo kept >victim
        ln -s ../victim theirs/ubtrfs.prom
        chown 65534:65534 theirs
        ubtrfs-metrics theirs
    "#;
    let mut command = namespace(bed.dir.path());
    command.args(["timeout", "-k", "5", "60", "sh", "-c", steps]).env("PATH", bed.search_path());
    let done = command.current_dir(bed.dir.path()).stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{done:?} {:?}", fs::read_to_string(bed.path("said")));

    let read = |name: &str| parse_metrics(&fs::read_to_string(bed.path(name)).unwrap());
    let label =
        |name: &str| format!("mountpoint=\"{}\"", text(&bed.path(name)).replace('\\', "\\\\").replace('"', "\\\""));
    let success = |name: &str| format!("ubtrfs_stats_success{{{}}}", label(name));
    let (first, second) = (read("first"), read("second"));
    let of = |samples: &BTreeMap<String, f64>, label: &str| samples.keys().filter(|key| key.contains(label)).count();
    assert_eq!((first[&success("a 1\"b\\c")], first[&success("gone")]), (1.0, 0.0));
    assert_eq!((second[&success("a 1\"b\\c")], second.get(&success("gone"))), (1.0, None));
    for samples in [&first, &second] {
        assert!(of(samples, &label("a 1\"b\\c")) > 100, "the counters of the mount that is left");
        assert_eq!(samples[&format!("ubtrfs_read_only{{{}}}", label("a 1\"b\\c"))], 0.0);
        assert!(samples.keys().all(|key| key.contains("mountpoint=\"")), "each sample has the label");
        for same in ["other", "bound", "nested/sub"] {
            assert_eq!(of(samples, &label(same)), 0, "each filesystem is shown once");
        }
    }
    // The last run had no mounts. Each run puts a complete new file in place of the old one, and leaves no other.
    let file = bed.path("out/ubtrfs.prom").metadata().unwrap();
    assert_eq!(file.len(), 0);
    assert_eq!(file.mode() & 0o777, 0o644, "node_exporter is another user");
    assert_ne!(file.ino(), bed.path("first").metadata().unwrap().ino());
    assert_eq!(fs::read_dir(bed.path("out")).unwrap().count(), 1);
    // In a directory of another user, that user writes, so links there lead root nowhere.
    let theirs = fs::symlink_metadata(bed.path("theirs/ubtrfs.prom")).unwrap();
    assert!(theirs.is_file() && (theirs.uid(), theirs.gid()) == (65_534, 65_534));
    assert_eq!(fs::read_to_string(bed.path("victim")).unwrap(), "kept\n");
}

#[cfg(feature = "remote")]
#[test]
fn the_push_service_pushes_and_keeps_few_snapshots() {
    use age::secrecy::ExposeSecret;
    if !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    let data = bed.make_dir("data");
    bed.make_dir("store");
    let unit = example("ubtrfs-push.service");
    // systemd shows the service a copy of the key.
    let (credential, _) = value_of(&unit, "LoadCredential").split_once(':').unwrap();
    let key = bed.make_dir("credentials").join(credential);
    fs::write(&key, age::x25519::Identity::generate().to_string().expose_secret()).unwrap();
    let (variable, file) = value_of(&unit, "Environment").split_once('=').unwrap();
    let key_variable = (variable.to_owned(), file.replace("%d", &text(&bed.path("credentials"))));
    // The other variables of the file are credentials of S3, which a directory does not need.
    let settings = example("ubtrfs-push.env");
    let mut settings = settings.lines().filter(|line| !line.starts_with('#')).map(|line| line.split_once('=').unwrap());
    assert!(settings.any(|(name, _)| name == "STORE"));
    let store = format!("file://{}", text(&bed.path("store")));
    let words = command_of(&unit);
    let words = words.iter().map(|word| word.replace("/srv/data", &text(&data)).replace("${STORE}", &store));
    let words: Vec<String> = words.collect();
    symlink(command_script("ubtrfs-push.service"), bed.path("bin").join(&words[0])).unwrap();
    symlink(env!("CARGO_BIN_EXE_ubtrfs"), bed.path("bin/ubtrfs")).unwrap();
    bed.script("bin/date", "#!/bin/sh\n[ \"$*\" = '-u +%Y%m%dT%H%M%SZ' ] && echo \"$NOW\"\n");

    ok(ubtrfs(["mount", "--create", "512M", &text(&bed.path("a.img")), &text(&data)]));
    let days = ["20261128T000501Z", "20261129T000502Z", "20261130T000503Z", "20261201T000504Z", "20261202T000505Z"];
    for day in days {
        fs::write(data.join("file"), day.repeat(1000)).unwrap();
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "60"]).args(&words).env("NOW", day).env("PATH", bed.search_path());
        command.env(&key_variable.0, &key_variable.1).current_dir(bed.dir.path()).stdin(Stdio::null());
        let done = command.output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }
    let mut kept: Vec<String> = fs::read_dir(data.join(".snapshots"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    kept.sort();
    assert_eq!(kept, days[2..]);
    // Names that others make could lead to what the script would delete.
    let theirs = data.join("theirs");
    fs::create_dir(&theirs).unwrap();
    for mode in [0o775, 0o757] {
        fs::set_permissions(&theirs, fs::Permissions::from_mode(mode)).unwrap();
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "60", &words[0], &words[1], &text(&theirs), &words[3]]).env("NOW", "20261203T000000Z");
        command.env("PATH", bed.search_path()).stdin(Stdio::null());
        let refused = command.output().unwrap();
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains("others may make links"), "{refused:?}");
        assert_eq!(fs::read_dir(&theirs).unwrap().count(), 0);
    }
    ok(ubtrfs(["umount", &text(&data)]));

    let with_key = |args: &[&str]| {
        let mut command = crate::common::command(args);
        ok(command.env(&key_variable.0, &key_variable.1).output().unwrap())
    };
    let list: serde_json::Value = serde_json::from_str(&with_key(&["remote", "list", "--json", &store])).unwrap();
    let stored = list["snapshots"].as_array().unwrap().iter();
    let stored: BTreeMap<&str, bool> =
        stored.map(|found| (found["name"].as_str().unwrap(), found["parent"].is_null())).collect();
    // For prune, all are of today, so it keeps the newest one with its parent. That is the full one of the new month.
    assert_eq!(stored, BTreeMap::from([(days[3], true), (days[4], false)]));
    let restored = bed.path("restored.img");
    ok(ubtrfs(["mkfs", "-q", "-b", "512M", &text(&restored)]));
    with_key(&["pull", "--quiet", &store, "latest", &text(&restored)]);
    let shown = ok(ubtrfs(["cat", &format!("{}:/{}/file", text(&restored), days[4])]));
    assert_eq!(shown, days[4].repeat(1000));
}

#[test]
fn the_units_for_rbd_mount_what_qemu_nbd_serves() {
    if !capability::program("qemu-nbd") || !capability::fuse() {
        return;
    }
    let mut bed = Bed::new();
    let (run, dir) = (bed.make_dir("run"), bed.make_dir("mnt"));
    let disk = bed.path("disk");
    fs::File::create(&disk).unwrap().set_len(300 << 20).unwrap();
    let (service, mount) = (joined("rbd-disk.service"), example("srv-rbd.mount"));
    let place = |word: &str| word.replace("/run/rbd-disk", &text(&run));
    assert_eq!(value_of(&service, "RuntimeDirectory"), "rbd-disk");
    let mut words: Vec<String> = command_of(&service).iter().map(|word| place(word)).collect();
    let image = words.pop().unwrap();
    assert!(image.starts_with("rbd:"), "{image}");
    words.push(text(&disk));
    // The pidfile, by which systemd knows the server, exists when this returns.
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "20"]).args(&words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(command.status().unwrap().success(), "{words:?}");
    let server = fs::read_to_string(place(value_of(&service, "PIDFile"))).unwrap().trim().to_owned();
    bed.servers.push(server);

    let url = value_of(&mount, "What");
    assert!(service.contains(&format!("ubtrfs mkfs '{url}'")), "the service tells how to make the filesystem");
    assert_eq!(value_of(&mount, "Type"), "ubtrfs");
    let url = place(url);
    let done = |output: &Output| assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    done(&ubtrfs(["mkfs", "-q", &url]));
    let dir = text(&dir);
    done(&ubtrfs(["mount", "-o", value_of(&mount, "Options"), &url, &dir]));
    fs::write(bed.path("mnt/file"), "on rbd\n").unwrap();
    done(&ubtrfs(["umount", &dir]));
    assert_eq!(ok(ubtrfs(["cat", &format!("{}:/file", text(&disk))])), "on rbd\n");
    assert!(ok(ubtrfs(["check", "--check-data-csum", &text(&disk)])).contains("clean"));
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn examples() -> PathBuf {
    repository().join("docs/examples")
}

/// An example's text.
fn example(name: &str) -> String {
    fs::read_to_string(examples().join(name)).unwrap()
}

/// An example's text, in which continued lines are joined.
fn joined(name: &str) -> String {
    example(name).replace("\\\n  ", "")
}

/// The only value of a key in a unit.
fn value_of<'a>(unit: &'a str, key: &str) -> &'a str {
    let mut values = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let value = values.next();
    assert!(value.is_some() && values.next().is_none(), "{key} is not there once: {unit}");
    value.unwrap()
}

/// The words of a service's command. The first one is a name without a directory, so that `PREFIX` of the installation does
/// not matter.
fn command_of(unit: &str) -> Vec<String> {
    let words: Vec<String> = value_of(unit, "ExecStart").split(' ').map(str::to_owned).collect();
    assert!(!words[0].contains('/') && !words.iter().any(|word| word.contains(['"', '\''])), "{words:?}");
    words
}

/// The script of the examples that a service runs.
fn command_script(service: &str) -> PathBuf {
    examples().join(&command_of(&joined(service))[0])
}

/// Whether an ordinary user can make user and mount namespaces.
///
/// # Panics
/// In CI, if that is impossible.
fn user_namespaces() -> bool {
    let tried = as_user().args(["unshare", "-Urmn", "true"]).output().unwrap();
    if !tried.status.success() {
        let why = String::from_utf8_lossy(&tried.stderr);
        assert!(!capability::in_ci(), "CI needs user namespaces of ordinary users: {why}");
        eprintln!("SKIPPED: this test needs user namespaces of ordinary users: {why}");
    }
    tried.status.success()
}

/// Begins a command of an ordinary user, which is killed after a minute: of the current user, or nobody for root.
fn as_user() -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "60"]).stdin(Stdio::null()).current_dir("/");
    if rustix::process::geteuid().is_root() {
        command.args(NOBODY);
    }
    command
}

/// The image of a container that a Containerfile makes.
#[derive(Default)]
struct Container {
    /// The files of the last stage.
    root: PathBuf,
    entrypoint: Vec<String>,
    cmd: Vec<String>,
    stop_signal: String,
}

/// A directory for all files of a test. Everybody can enter it.
struct Bed {
    dir: TempDir,
    /// Processes that end with the test.
    servers: Vec<String>,
}

impl Bed {
    fn new() -> Self {
        let dir = TempDir::with_prefix("ubtrfs-deploy-").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let bed = Self { dir, servers: Vec::new() };
        bed.make_dir("bin");
        bed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn make_dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn script(&self, name: &str, content: &str) {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Makes a file the property of the user that [`as_user`] means.
    fn give_to_user(&self, path: &Path) {
        if rustix::process::geteuid().is_root() {
            chown(path, Some(65534), Some(65534)).unwrap();
        }
    }

    /// `PATH` with the programs of this directory first.
    fn search_path(&self) -> String {
        format!("{}:{}", text(&self.path("bin")), std::env::var("PATH").unwrap())
    }

    /// Builds what a Containerfile of the examples says, with the directory `context`. The base has the libraries of the
    /// program, and these further programs. Commands run in a new user namespace without a network.
    fn build(&self, name: &str, programs: &[&str]) -> Container {
        let mut built = Container::default();
        let mut stages: BTreeMap<String, PathBuf> = BTreeMap::new();
        let mut variables = vec![("PATH".to_owned(), CONTAINER_PATH.to_owned())];
        let list = |rest: &str| -> Vec<String> { serde_json::from_str(rest).unwrap() };
        for line in joined(name).lines().filter(|line| !line.starts_with('#')) {
            let (instruction, rest) = line.split_once(' ').unwrap();
            let words: Vec<&str> = rest.split(' ').collect();
            match (instruction, words.as_slice()) {
                ("FROM", [base, stage @ ..]) => {
                    let root = TempDir::with_prefix_in("root-", self.dir.path()).unwrap().keep();
                    fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
                    self.give_to_user(&root);
                    if *base != "scratch" {
                        fs::create_dir(root.join("proc")).unwrap();
                        install_programs(&root, programs);
                    }
                    if let ["AS", stage] = stage {
                        stages.insert((*stage).to_owned(), root.clone());
                    }
                    built.root = root;
                }
                ("ARG", [setting]) => {
                    let (name, value) = setting.split_once('=').unwrap();
                    variables.push((name.to_owned(), value.to_owned()));
                }
                ("COPY", [from, to]) => copy(&self.path("context").join(from), &built.root, to),
                ("COPY", [stage, from, to]) => {
                    let stage = &stages[stage.strip_prefix("--from=").unwrap()];
                    copy(&stage.join(from.trim_start_matches('/')), &built.root, to);
                }
                ("RUN", _) => {
                    let mut command = as_user();
                    command.args(["unshare", "-Urmn", "sh", "-c", ENTER, "sh"]).arg(&built.root).args(list(rest));
                    let done = command.env_clear().envs(variables.iter().cloned()).output().unwrap();
                    assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
                }
                ("ENTRYPOINT", _) => built.entrypoint = list(rest),
                ("CMD", _) => built.cmd = list(rest),
                ("STOPSIGNAL", [signal]) => built.stop_signal = (*signal).to_owned(),
                _ => panic!("{name}: {line}"),
            }
        }
        built
    }

    /// Runs the example `mount-beside` as an ordinary user in the namespaces that stand for those of podman.
    fn mount_beside(&self, image: &Path, words: &str) -> Output {
        for dir in ["tmp", "state"] {
            let path = self.make_dir(dir);
            self.give_to_user(&path);
        }
        // The user may be unable to enter the repository.
        self.script("bin/mount-beside", &example("mount-beside"));
        fs::write(self.path("running"), "").unwrap();
        self.give_to_user(&self.path("running"));
        let mut command = as_user();
        command.args(["unshare", "-Urm", "mount-beside"]).arg(image).args(["sh", "-c", words]);
        command.env("PATH", self.search_path()).env("TMPDIR", self.path("tmp")).env("BED", self.dir.path());
        command.env("READER", "reader").env("CONTAINER_PATH", CONTAINER_PATH).env("LC_ALL", "C").output().unwrap()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let running = fs::read_to_string(self.path("running")).unwrap_or_default();
        for process in running.lines().chain(self.servers.iter().map(String::as_str)) {
            let _ = Command::new("kill").args(["-KILL", process]).stderr(Stdio::null()).status();
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for point in mounts.lines().filter_map(|line| line.split(' ').nth(4)) {
            if Path::new(point).starts_with(self.dir.path()) {
                let _ = Command::new(env!("CARGO_BIN_EXE_ubtrfs")).args(["umount", point]).output();
            }
        }
    }
}

/// Copies a file, or the content of a directory, to a path in a container.
fn copy(from: &Path, root: &Path, to: &str) {
    let to = root.join(to.trim_start_matches('/'));
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    if from.is_dir() {
        ok(Command::new("cp").args(["-a", "-T"]).args([from, &to]).output().unwrap());
    } else {
        fs::copy(from, &to).unwrap();
    }
}

/// Puts programs of this machine into a root directory, with their libraries and those of ubtrfs.
fn install_programs(root: &Path, programs: &[&str]) {
    let search_path = std::env::var_os("PATH").unwrap();
    let found = |name: &&str| std::env::split_paths(&search_path).map(|dir| dir.join(name)).find(|path| path.exists());
    let programs: Vec<PathBuf> = programs.iter().map(|name| found(name).unwrap()).collect();
    for program in &programs {
        copy(program, root, &format!("/bin/{}", program.file_name().unwrap().to_str().unwrap()));
    }
    let mut libraries = BTreeSet::new();
    for program in programs.iter().map(PathBuf::as_path).chain([Path::new(env!("CARGO_BIN_EXE_ubtrfs"))]) {
        let list = ok(Command::new("ldd").arg(program).output().unwrap());
        libraries.extend(list.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned));
    }
    for library in libraries {
        copy(Path::new(&library), root, &library);
    }
}

/// Reads the text format of Prometheus, and fails for everything that its parsers refuse. Returns the samples.
fn parse_metrics(text: &str) -> BTreeMap<String, f64> {
    let is_name = |name: &str| {
        !name.is_empty()
            && !name.starts_with(|c: char| c.is_ascii_digit())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
    };
    let (mut samples, mut seen) = (BTreeMap::new(), BTreeSet::new());
    let (mut family, mut kind) = ("", "");
    assert!(text.ends_with('\n') || text.is_empty());
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        if let ["#", "HELP", name, help] = words[..] {
            assert!(is_name(name) && !help.is_empty() && seen.insert(name), "{line}");
            (family, kind) = (name, "");
            continue;
        }
        if let ["#", "TYPE", name, found] = words[..] {
            assert!(name == family && kind.is_empty(), "one HELP, then one TYPE: {line}");
            assert!(["counter", "gauge", "histogram"].contains(&found), "{line}");
            kind = found;
            continue;
        }
        let (key, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = key.split_once('{').unwrap();
        let suffixes: &[&str] = if kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
        let belongs = suffixes.iter().any(|suffix| name.strip_prefix(family) == Some(*suffix));
        assert!(!kind.is_empty() && belongs, "a sample of another metric than {family}: {line}");
        let mut rest = labels.strip_suffix('}').unwrap();
        let mut names = BTreeSet::new();
        while !rest.is_empty() {
            let (label, value) = rest.split_once("=\"").unwrap();
            assert!(is_name(label) && names.insert(label), "{line}");
            let mut chars = value.char_indices();
            let end = loop {
                match chars.next().unwrap() {
                    (at, '"') => break at,
                    (_, '\\') => assert!(matches!(chars.next().unwrap().1, '\\' | '"' | 'n'), "{line}"),
                    _ => {}
                }
            };
            rest = &value[end + 1..];
            rest = rest.strip_prefix(',').unwrap_or_else(|| {
                assert!(rest.is_empty(), "{line}");
                rest
            });
        }
        assert!(samples.insert(key.to_owned(), value.parse().unwrap()).is_none(), "twice: {line}");
    }
    samples
}

/// Runs a command in a root directory, which gets /proc.
const ENTER: &str = "mount --rbind /proc \"$1/proc\" && cd / && exec chroot \"$@\"";

/// The search path in a container.
const CONTAINER_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Stands in for podman. A container is named by its process. `$BED/images` has the images, `$BED/running` the containers.
const PODMAN: &str = r#"#!/bin/sh
set -eu
unknown() { echo "podman: unknown words: $*" >&2; exit 125; }
# A process that nobody waits for stays as a zombie.
runs() { grep -qs '^State:.[^ZX]' "/proc/$1/status"; }

verb=$1
shift
case $verb in
  unshare) exec "$@" ;;
  run) ;;
  exec)
    runs "$1" || exit 125
    container=$1
    shift
    exec env -i PATH="$CONTAINER_PATH" nsenter --target "$container" --mount --net --root --wd=/ "$@"
    ;;
  inspect)
    [ "$1 $2" = "--format {{.State.Running}}" ] || unknown "$@"
    if runs "$3"; then echo true; else echo false; fi
    exit
    ;;
  stop)
    [ "$1" = --time ] || unknown "$@"
    kill -s "$(sed s/^SIG// "$BED/state/$3.signal")" "$3" 2>/dev/null || true
    while runs "$3"; do sleep 0.02; done
    echo "$3"
    exit
    ;;
  logs) exec cat "$BED/state/$1.log" ;;
  rm)
    ! runs "$1" || exit 2
    : >"$BED/running"
    echo "$1"
    exit
    ;;
  *) unknown "$verb" ;;
esac

detach=no caps=-all device=/dev/null propagation=slave volumes=
while :; do
  case $1 in
    --detach) detach=yes ;;
    --rm) ;;
    --network) [ "$2" = none ] || unknown "$@"; shift ;;
    --device) device=$2; shift ;;
    --cap-drop) [ "$2" = all ] || unknown "$@"; shift ;;
    --cap-add) caps=$caps,+$2; shift ;;
    --security-opt) [ "$2" = label=disable ] || unknown "$@"; shift ;;
    --volume) volumes="$volumes $2"; case $2 in *:rshared) propagation=unchanged ;; esac; shift ;;
    -*) unknown "$@" ;;
    *) break ;;
  esac
  shift
done
image=$BED/images/$1
[ -d "$image" ] || { echo "podman: no image $1" >&2; exit 125; }
shift
[ $# -gt 0 ] || set -- $(cat "$image/cmd")
set -- $(cat "$image/entrypoint") "$@"

inner='
  set -eu
  root=$1 device=$2 caps=$3 volumes=$4
  shift 4
  for volume in $volumes; do
    from=${volume%%:*} rest=${volume#*:}
    mount --rbind "$from" "$root${rest%%:*}"
    case $rest in *:rslave) mount --make-rslave "$root${rest%%:*}" ;; esac
  done
  for device in /dev/null "$device"; do mount --bind "$device" "$root$device"; done
  mount --rbind /proc "$root/proc"
  cd /
  exec env -i PATH="$CONTAINER_PATH" chroot "$root" setpriv --bounding-set "$caps" --inh-caps=-all "$@"'
set -- unshare --mount --net --propagation "$propagation" sh -c "$inner" sh "$(realpath "$image/root")" "$device" "$caps" "$volumes" "$@"
[ $detach = yes ] || exec "$@"
log=$BED/state/new-$$
: >"$log"
"$@" </dev/null >"$log" 2>&1 &
echo $! >"$BED/running"
ln "$log" "$BED/state/$!.log"
cp "$image/signal" "$BED/state/$!.signal"
echo $!
"#;
