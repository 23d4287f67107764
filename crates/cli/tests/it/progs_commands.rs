//! Runs command lines of btrfs-progs on Linux's mount of an image, and by links to this program on a mount of an equal
//! image. Output and status are equal, except where the table (`programs/progs_commands.txt`) gives a reason.
//!
//! Not compared, because they say something else in every run or on every filesystem: paths of mounts, UUIDs, times, the
//! size of the global reserve, the time at which a subvolume was sent (Linux has one for subvolumes that were not), and
//! everything on stderr.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, run as sh};

use crate::common::{ok, text, ubtrfs};

const LINES: &str = include_str!("programs/progs_commands.txt");

/// An image that Linux made, with subvolumes, snapshots, links, a property, quotas and a limit.
fn image() -> Image {
    let image = Image::kernel_made(512 << 20, &["-L", "lbl"]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let at = |name: &str| text(&linux.join(name));
    for name in ["a", "a/n"] {
        sh("btrfs", ["subvolume", "create", &at(name)]).unwrap();
    }
    fs::write(linux.join("a/f"), [7; 200_000]).unwrap();
    sh("cp", ["--reflink=always", &at("a/f"), &at("a/g")]).unwrap();
    fs::create_dir(linux.join("d")).unwrap();
    fs::write(linux.join("d/x"), "text").unwrap();
    fs::hard_link(linux.join("d/x"), linux.join("d/y")).unwrap();
    sh("btrfs", ["subvolume", "snapshot", "-r", &at("a"), &at("s")]).unwrap();
    sh("btrfs", ["subvolume", "snapshot", &at("a"), &at("w")]).unwrap();
    sh("btrfs", ["property", "set", &at("d"), "compression", "zstd"]).unwrap();
    sh("btrfs", ["quota", "enable", &at("")]).unwrap();
    sh("btrfs", ["quota", "rescan", "-w", &at("")]).unwrap();
    sh("btrfs", ["qgroup", "limit", "1G", &at("a")]).unwrap();
    linux.close().unwrap();
    image
}

/// One of the two sides: a mount, its image, and a directory outside.
struct Side<'a> {
    mount: &'a Path,
    image: &'a Path,
    dir: &'a Path,
    /// A folder of programs that take precedence over those in PATH.
    programs: Option<&'a Path>,
}

impl Side<'_> {
    fn run(&self, line: &str) -> Output {
        let places = [("{m}", self.mount), ("{i}", self.image), ("{d}", self.dir)];
        let line = places.iter().fold(line.to_owned(), |line, (name, path)| line.replace(name, &text(path)));
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "120", "sh", "-c", &line]).env("LC_ALL", "C").env("TZ", "UTC").stdin(Stdio::null());
        if let Some(programs) = self.programs {
            command.env("PATH", format!("{}:{}", text(programs), std::env::var("PATH").unwrap()));
        }
        command.output().unwrap()
    }

    /// The output without what differs in every run.
    fn normal(&self, output: &Output, with_widths: bool) -> String {
        let all = String::from_utf8_lossy(&output.stdout).replace(&text(self.mount), "MOUNT");
        if let Ok(value @ Value::Object(_)) = serde_json::from_str(&all) {
            return without_device(value).to_string();
        }
        let is_kept =
            |line: &&str| !["GlobalReserve", "Global reserve", "Send time"].iter().any(|word| line.contains(word));
        let lines = all.lines().filter(is_kept).map(|line| {
            let words = line.split(' ').map(|word| normal_word(word, self.image));
            let line = words.collect::<Vec<_>>().join(" ");
            if with_widths { line.trim_end().to_owned() } else { squeezed(&line) }
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// A value without the names of devices and the global reserve.
fn without_device(mut value: Value) -> Value {
    for list in ["device-stats", "filesystem-df"] {
        for entry in value[list].as_array_mut().into_iter().flatten() {
            if entry["bg-type"] == "GlobalReserve" {
                entry["total"] = "N".into();
            }
            if let Some(device) = entry.get_mut("device") {
                *device = "DEVICE".into();
            }
        }
    }
    value
}

/// Replaces UUIDs, dates, times, and names of devices.
fn normal_word(word: &str, image: &Path) -> String {
    let has_form = |part: &str, form: &str| {
        part.len() == form.len()
            && part.bytes().zip(form.bytes()).all(|(byte, form)| match form {
                b'x' => byte.is_ascii_hexdigit(),
                b'0' => byte.is_ascii_digit(),
                form => byte == form,
            })
    };
    let part = |part: &str| match part {
        _ if has_form(part, "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx") => "UUID".to_owned(),
        _ if has_form(part, "0000-00-00") => "DATE".to_owned(),
        _ if has_form(part, "00:00:00") => "TIME".to_owned(),
        _ => {
            let loop_device = part.find("/dev/loop").map(|at| {
                let end = part[at + 9..].find(|letter: char| !letter.is_ascii_digit());
                (at, end.map_or(part.len(), |end| at + 9 + end))
            });
            match loop_device {
                Some((at, end)) => format!("{}DEVICE{}", &part[..at], &part[end..]),
                None => part.replace(&text(image), "DEVICE"),
            }
        }
    };
    word.split('\t').map(part).collect::<Vec<_>>().join("\t")
}

/// A line with single spaces and without the lengths of rules.
fn squeezed(line: &str) -> String {
    let is_rule = |word: &str| word.len() > 1 && word.bytes().all(|byte| byte == b'-');
    line.split_whitespace().map(|word| if is_rule(word) { "--" } else { word }).collect::<Vec<_>>().join(" ")
}

#[test]
fn command_lines_of_btrfs_progs_give_its_output_and_status() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let (theirs, dir) = (image(), TempDir::with_prefix("ubtrfs-progs-").unwrap());
    let at = |name: &str| dir.path().join(name);
    for name in ["ours", "theirs", "mount", "bin"] {
        fs::create_dir(at(name)).unwrap();
    }
    for name in ["btrfs", "btrfsck", "mkfs.btrfs", "fsck.btrfs"] {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ubtrfs"), at("bin").join(name)).unwrap();
    }
    let image = at("i.img");
    sh("cp", ["--sparse=always", &text(theirs.path()), &text(&image)]).unwrap();
    ok(ubtrfs(["mount", &text(&image), &text(&at("mount"))]));
    let linux = LoopMount::new(theirs.path(), "").unwrap();
    let (mount, bin, outside) = (at("mount"), at("bin"), [at("ours"), at("theirs")]);
    let ours = Side { mount: &mount, image: &image, dir: &outside[0], programs: Some(&bin) };
    let linux_side = Side { mount: linux.path(), image: theirs.path(), dir: &outside[1], programs: None };

    let (mut different, mut nr_lines, mut nr_reasons) = (Vec::new(), 0, 0);
    for line in LINES.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (line, reason) = line.split_once(" ## ").map_or((line, None), |(line, reason)| (line, Some(reason)));
        let (line, with_widths) = line.strip_prefix('~').map_or((line, true), |line| (line, false));
        let (one, other) = (linux_side.run(line), ours.run(line));
        nr_lines += 1;
        nr_reasons += usize::from(reason.is_some());
        let is_equal = one.status.code() == other.status.code()
            && linux_side.normal(&one, with_widths) == ours.normal(&other, with_widths);
        if !is_equal && reason.is_none() {
            different.push(format!(
                "{line}\nstatus {:?} and {:?}\n--- btrfs-progs\n{}\n--- ours\n{}\n{}",
                one.status.code(),
                other.status.code(),
                linux_side.normal(&one, with_widths),
                ours.normal(&other, with_widths),
                String::from_utf8_lossy(&other.stderr),
            ));
        }
    }
    linux.close().unwrap();
    ok(ubtrfs(["umount", &text(&mount)]));
    btrfs_check(&image).unwrap();
    println!("{nr_lines} command lines, {nr_reasons} with a reason for a difference");
    assert!(different.is_empty(), "{} differ:\n\n{}", different.len(), different.join("\n\n"));
}

#[test]
fn names_of_btrfs_progs_on_linux_own_btrfs_run_its_program() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let linux = LoopMount::new(image.path(), "").unwrap();
    let dir = TempDir::new().unwrap();
    let link = dir.path().join("btrfs");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ubtrfs"), &link).unwrap();
    let new = text(&linux.join("new"));
    assert_eq!(
        ok(Command::new(&link).args(["sub", "create", &new]).output().unwrap()),
        format!("Create subvolume '{new}'\n")
    );
    assert!(ok(Command::new(&link).args(["sub", "li", &text(linux.path())]).output().unwrap()).ends_with("path new\n"));
    // A command is no path, even if a file has its name.
    fs::write(linux.join("list"), "").unwrap();
    let elsewhere = Command::new(&link).args(["sub", "list", "/proc"]).current_dir(linux.path()).output().unwrap();
    assert!(String::from_utf8_lossy(&elsewhere.stderr).contains("ubtrfs"), "{elsewhere:?}");
    let alone =
        Command::new(&link).args(["sub", "li", &text(linux.path())]).env("UBTRFS_PASSED_ON", "1").output().unwrap();
    assert_eq!(alone.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&alone.stderr).contains("install btrfs-progs"), "{alone:?}");
    linux.close().unwrap();
}

#[test]
fn programs_and_commands_that_do_not_exist_are_refused_by_name() {
    let dir = TempDir::new().unwrap();
    let link = |name: &str| {
        let link = dir.path().join(name);
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ubtrfs"), &link).unwrap();
        link
    };
    let fails = |command: &mut Command, words: &str| {
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            output.status.code() == Some(1) && stderr.starts_with("ERROR: ") && stderr.contains(words),
            "{output:?}"
        );
    };
    fails(Command::new(link("btrfstune")).args(["-f", "-u", "x"]), "x does not exist");
    fails(Command::new(link("btrfs-image")).arg("x"), "btrfs-image: ubtrfs does not have this program");
    let btrfs = link("btrfs");
    fails(Command::new(&btrfs).args(["rep", "start", "1", "/dev/x", "/m"]), "cannot open /m");
    fails(Command::new(&btrfs).args(["dev", "replace", "1", "/dev/x", "/m"]), "btrfs replace start DEVICE NEW PATH");
    fails(Command::new(&btrfs).args(["restore", "x", "y"]), "ubtrfs cp -r");
    let help = ok(Command::new(&btrfs).args(["help"]).output().unwrap());
    assert!(help.contains("btrfs subvolume snapshot") && help.contains("not in ubtrfs"), "{help}");
}

/// A directory with links by which this program is called as programs of btrfs-progs.
fn links() -> TempDir {
    let dir = TempDir::with_prefix("ubtrfs-links-").unwrap();
    for name in ["btrfs", "mkfs.btrfs"] {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ubtrfs"), dir.path().join(name)).unwrap();
    }
    dir
}

#[test]
fn the_help_of_mkfs_btrfs_names_the_program_once() {
    let links = links();
    let program = links.path().join("mkfs.btrfs");
    let help = ok(Command::new(&program).arg("--help").output().unwrap());
    assert!(help.contains("Usage: mkfs.btrfs [OPTIONS]"), "{help}");
    let wrong = Command::new(&program).arg("--nope").output().unwrap();
    let stderr = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(stderr.starts_with("mkfs.btrfs: ") && stderr.ends_with("see: mkfs.btrfs --help\n"), "{stderr}");
    assert!(!stderr.contains("mkfs.btrfs mkfs") && wrong.status.code() == Some(1), "{stderr}");
}

/// `show` without a path, by UUID, and by label, for filesystems of Linux and of this program.
#[test]
fn filesystems_of_both_programs_are_shown() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let (links, theirs) = (links(), Image::kernel_made(256 << 20, &["-L", "label of linux"]).unwrap());
    let at = |name: &str| text(&links.path().join(name));
    let linux = LoopMount::new(theirs.path(), "").unwrap();
    fs::create_dir(at("m")).unwrap();
    ok(ubtrfs(["mkfs", "-q", "-b", "200M", "-L", "label of ours", &at("i.img")]));
    ok(ubtrfs(["mount", &at("i.img"), &at("m")]));
    let show = |words: &[&str]| Command::new(at("btrfs")).args(["filesystem", "show"]).args(words).output().unwrap();
    let all = ["--raw", "--raw -m"].map(|words| show(&words.split(' ').collect::<Vec<_>>()));
    let shown = ok(ubtrfs(["filesystem", "show"]));
    let uuid = |output: &str, label: &str| {
        let line = output.lines().find(|line| line.contains(label)).unwrap_or_else(|| panic!("{label}: {output}"));
        line.rsplit(' ').next().unwrap().to_owned()
    };
    let own = uuid(&shown, "label of ours");
    let devices = show(&["-d"]);
    let by_name = [show(&[&own]), show(&["label of ours"]), show(&["-m", &own.to_uppercase()])];
    let other = uuid(&String::from_utf8_lossy(&all[0].stdout), "label of linux");
    let others = [show(&[&other]), show(&["label of linux"])];
    let none = show(&["no such label"]);
    ok(ubtrfs(["umount", &at("m")]));
    linux.close().unwrap();
    // btrfs-progs warns of devices of other programs on stderr.
    let found = |output: Output| {
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for output in all {
        let output = found(output);
        assert_eq!(output.matches(&own).count(), 1, "{output}");
        assert_eq!(output.matches(&other).count(), 1, "{output}");
        assert!(output.contains("devid    1 size 209715200 used"), "{output}");
    }
    assert!(!shown.contains("label of linux") && shown.contains(&at("i.img")), "{shown}");
    let devices = found(devices);
    assert!(devices.contains(&other) && !devices.contains(&own), "{devices}");
    for output in by_name {
        let output = found(output);
        assert!(output.contains("label of ours") && output.matches("Label:").count() == 1, "{output}");
    }
    for output in others {
        let output = found(output);
        assert!(output.contains("label of linux") && output.matches("Label:").count() == 1, "{output}");
    }
    assert_eq!(none.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(stderr.contains("ERROR: not a valid btrfs filesystem: no such label\n"), "{stderr}");
}

#[test]
fn error_counters_of_a_named_device_are_its_own() {
    if !capability::fuse() {
        return;
    }
    let links = links();
    let at = |name: &str| text(&links.path().join(name));
    let [one, two, m] = ["one.img", "two.img", "m"].map(at);
    let mut content = vec![b'-'; 8 << 20];
    content[..8].copy_from_slice(b"the file");
    fs::write(at("file"), &content).unwrap();
    for image in [&one, &two] {
        fs::File::create(image).unwrap().set_len(256 << 20).unwrap();
    }
    ok(ubtrfs(["mkfs", "-q", "-d", "raid1", "-m", "raid1", &one, &two]));
    ok(ubtrfs(["cp", &at("file"), &format!("{one}:/file")]));
    // Each device loses another block of the file.
    for (image, block) in [(&one, 0), (&two, 1)] {
        let mut bytes = fs::read(image).unwrap();
        let begin = (0..bytes.len()).step_by(4096).find(|&at| bytes[at..].starts_with(b"the file")).unwrap();
        bytes[begin + block * 4096..][100..110].fill(0);
        fs::write(image, &bytes).unwrap();
    }
    fs::create_dir(&m).unwrap();
    ok(ubtrfs(["mount", &one, &m]));
    ubtrfs(["scrub", "start", "-B", &m]);
    let stats = |words: &[&str]| ok(Command::new(at("btrfs")).args(["device", "stats"]).args(words).output().unwrap());
    let errors = |text: &str, device: &str| {
        let line = text.lines().find(|line| line.starts_with(&format!("[{device}].corruption_errs")));
        line.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
    };
    let both = stats(&[&m]);
    assert!(errors(&both, &one) > Some(0) && errors(&both, &two) > Some(0), "{both}");
    let of_one = stats(&["-z", &one]);
    assert_eq!((errors(&of_one, &one), errors(&of_one, &two)), (errors(&both, &one), None), "{of_one}");
    // Another name of a device is the device, and what is no device of the filesystem is refused.
    fs::hard_link(&two, at("other name")).unwrap();
    let of_two = stats(&[&at("other name")]);
    assert_eq!((errors(&of_two, &one), errors(&of_two, &two)), (None, errors(&both, &two)), "{of_two}");
    fs::copy(&two, at("copy")).unwrap();
    let copy = Command::new(at("btrfs")).args(["device", "stats", "-z", &at("copy")]).output().unwrap();
    assert!(!copy.status.success(), "{copy:?}");
    let after = stats(&[&m]);
    assert_eq!((errors(&after, &one), errors(&after, &two)), (Some(0), errors(&both, &two)), "{after}");
    ok(ubtrfs(["umount", &m]));
}

#[test]
fn calls_that_linux_refuses_have_the_words_of_btrfs_progs() {
    if !capability::fuse() {
        return;
    }
    let links = links();
    let at = |name: &str| text(&links.path().join(name));
    let [image, new, m] = ["i.img", "new.img", "m"].map(at);
    ok(ubtrfs(["mkfs", "-q", "-b", "256M", &image]));
    fs::File::create(&new).unwrap().set_len(256 << 20).unwrap();
    fs::create_dir(&m).unwrap();
    let refusal = |words: &[&str]| {
        let output = Command::new(at("btrfs")).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    ok(ubtrfs(["mount", &image, &m]));
    assert_eq!(refusal(&["device", "remove", "3", &m]), "ERROR: error removing devid 3: No such file or directory\n");
    ok(ubtrfs(["umount", &m]));
    ok(ubtrfs(["mount", "-r", &image, &m]));
    let expected = format!("ERROR: ioctl(DEV_REPLACE_START) failed on \"{m}\": Read-only file system\n");
    assert_eq!(refusal(&["replace", "start", "-B", "1", &new, &m]), expected);
    ok(ubtrfs(["umount", &m]));
}
