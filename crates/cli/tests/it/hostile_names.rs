//! Tests of names that hold control or invisible characters or a backslash, or are not UTF-8.
//!
//! Method: a filesystem has files, directories, subvolumes, links and attributes with such names. Each command that
//! prints names runs on a mount and on the image, as text and as JSON. Its output holds no control, invisible or
//! replacement character; JSON can be read, and gives every name exactly. Text shows a backslash as two.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;
use ubtrfs_testkit::{Image, btrfs_check, capability};

use crate::common::{ok, text, ubtrfs};

/// A name with control characters of one byte and of two, invisible characters, and a backslash, which is UTF-8.
const CONTROLS: &[u8] = "c\u{1b}[2J\n\t\u{7f}\u{9b}1m\u{202e}\u{2066}\u{200b}\u{2029}\\n".as_bytes();
/// A label, which cannot hold the end of a line.
const LABEL: &[u8] = "\u{1b}[2J\u{7f}\u{9b}1m".as_bytes();
/// A name that is not UTF-8.
const BYTES: &[u8] = b"b\x1b[31m\n\xff\xc3";

/// The commands of these lines print names. `M` is a mount, or an image and `:/`; `F` is the mount, or the image; `C`
/// and `B` are the hostile names, `K` a hostile label; `S` is a subvolume with the name `B`, `O` and `N` are an older
/// and a newer snapshot of it; `T` is a directory of the host. `!` marks a command that fails.
const LINES: &[&str] = &[
    "subvolume list F",
    "subvolume list --json F",
    "subvolume list -t F",
    "subvolume list -a M/S",
    "subvolume list -o M/S",
    "!subvolume list M/S/missingB",
    "subvolume show M/S",
    "subvolume show --json M/S",
    "!subvolume show M/S/dirC",
    "!subvolume show --json M/S/missingB",
    "subvolume create M/madeB",
    "!subvolume create M/madeB",
    "subvolume snapshot M/madeB M/takenC",
    "subvolume snapshot -r M/madeB M/takenB",
    "!subvolume snapshot M/S/dirC M/x",
    "subvolume set-default M/takenC",
    "subvolume get-default F",
    "!subvolume set-default M/S/dirC",
    "subvolume set-default 5 F",
    "subvolume set-read-only M/madeB true",
    "!subvolume set-read-only M/S/dirC true",
    "subvolume delete -v M/madeB M/takenB",
    "subvolume delete M/takenC",
    "!subvolume delete M/S/dirC",
    "subvolume sync F",
    "subvolume find-new M/S 1",
    "!subvolume find-new M/S/dirC 1",
    "filesystem du M/S",
    "filesystem du --json M/S",
    "filesystem du -s M/S/dirC M/S/dirB",
    "filesystem du -s --json M/S/dirC M/S/dirB",
    "!filesystem du M/S/missingB",
    "filesystem defragment -rv M/S",
    "!filesystem defragment -v M/S/dirB",
    "!filesystem fiemap M/S/missingB",
    "filesystem fiemap --json M/S/dirB/fileB",
    "!filesystem clone M/S/missingB M/S/missingC",
    "!filesystem dedupe M/S/dirB/fileB M/S/dirC/fileC",
    "filesystem label F labelK",
    "property get M/ label",
    "filesystem df F",
    "filesystem usage F",
    "filesystem show --json F",
    "filesystem show F",
    "filesystem label F",
    "!property get M/S/missingB",
    "property list M/S/dirB",
    "property get M/S/dirB/fileB",
    "!property set M/S/dirB ro true",
    "quota enable F",
    "qgroup show F",
    "qgroup show --json F",
    "qgroup show --tree F",
    "!qgroup limit 1G M/S/missingB",
    "quota disable F",
    "inspect rootid M/S/dirC",
    "!inspect rootid M/S/missingB",
    "inspect subvolid-resolve 256 F",
    "inspect subvolid-resolve 257 F",
    "inspect inode-resolve 257 M/S",
    "inspect inode-resolve 258 M/S",
    "inspect inode-resolve 259 M/S",
    "inspect logical-resolve ADDRESS F",
    "send M/N -f T/whole",
    "send -p M/O M/N -f T/increment",
    "!send M/S -f T/none",
    "!send M/S/missingB -f T/none",
    "send --diff M/O M/N",
    "send --diff --json M/O M/N",
    "subvolume snapshot -r M/S M/pushedB",
    "subvolume snapshot -r M/S M/pushedC",
    "push M/pushedB file://T/store",
    "push --json M/pushedC file://T/store",
    "!push M/S/missingB file://T/store",
    "remote list file://T/store",
    "remote list --json file://T/store",
    "remote verify file://T/store",
    "remote prune -n --keep-last 1 file://T/store",
    "remote prune --json --keep-last 9 file://T/store",
    "pull file://T/store latest M/into",
    "!pull file://T/store missingB M/into",
    "receive --dump -f T/whole",
    "receive --dump -f T/increment",
    "receive -v -f T/whole M/into",
    "receive --json -f T/whole M/into2",
    "!receive -f T/whole M/into",
    "!receive -f T/increment M/S/missingB",
    "!receive -f T/missingB M/into",
    "!device add M/S/missingB F",
    "!device remove M/S/missingB F",
    "!replace start 1 M/S/missingB F",
    "!replace start M/S/missingB M/S/missingC F",
    "replace status -1 F",
    "!replace cancel F",
    "device stats F",
    "device stats -T F",
    "device stats --json F",
    "device usage F",
    "balance start F",
    "balance status --json F",
    "scrub start -B F",
    "scrub status -d F",
    "sync F",
    "filesystem sync F",
];

/// Lines for an image: `I` is the image, the other letters are those of [`LINES`].
const IMAGE_LINES: &[&str] = &[
    "device ready I",
    "device scan I",
    "ls -lR I:/",
    "ls -R I:/",
    "ls -d I:/S/dirC I:/S/dirB",
    "ls -R --json I:/",
    "ls -R --json I:/S/links",
    "!ls I:/S/missingB",
    "!ls --json I:/S/missingC",
    "!cat I:/S/dirB",
    "stat I:/S/dirB I:/S/links/linkB I:/S/links/linkC I:/S/dirC/fileC",
    "stat --json I:/S/dirB I:/S/links/linkB I:/S/links/linkC I:/S/dirC/fileC",
    "!stat I:/S/missingB",
    "cp -r I:/S/dirB T/copyB",
    "cp -a T/copyB I:/copyC",
    "!cp I:/S/dirB T/copy2",
    "!cp T/missingB I:/",
    "!cp I:/S/missingB T",
    "mkdir I:/newB",
    "!mkdir I:/newB",
    "!rm I:/newB",
    "rm -r I:/newB",
    "find I",
    "find I:/S -name *B",
    "find --json I:/S",
    "!find I:/S/missingB",
    "!find I:/S/*missingB",
    "diff I I",
    "edit I T/script",
    "!edit I T/wrong-script",
    "shell I",
    "!diff I:/S I:/S/dirC",
    "!diff --json I:/S I:/S/dirC",
    "!diff I:/S I:/S/missingB",
    "getfattr -d I:/S/dirB/fileB I:/S/dirC/fileC",
    "getfattr --json I:/S/dirB/fileB I:/S/dirC/fileC",
    "!getfattr -n user.missingC I:/S/dirC/fileC",
    "!getfattr -n user.missingB I:/S/dirC/fileC",
    "setfattr -n user.newB -v valueC I:/S/dirC/fileC",
    "getfattr -d I:/S/dirC/fileC",
    "setfattr -x user.newB I:/S/dirC/fileC",
    "!setfattr -x user.newB I:/S/dirC/fileC",
    "!setfattr -n user.a -v 0xC I:/S/dirC/fileC",
    "!mv I:/S/dirB I:/S/dirB/x",
    "!mv I:/S/missingC I:/newC",
    "mv I:/S/dirC/fileC I:/newC",
    "mv I:/newC I:/S/dirC/fileC",
    "!ln I:/S/missingC I:/newC",
    "!ln -s textC I:/S/dirB/fileB",
    "!chmod B I:/S/dirC",
    "!chmod 600 I:/S/missingB",
    "!chmod -R 755 I:/old/dirB",
    "chmod -R u+rw I:/S/dirB",
    "!chown C I:/S/dirB",
    "!chown xC:yB I:/S/missingB",
    "!chown -R 0 I:/old/dirC",
    "chown -R 0:0 I:/S/dirC",
    "!touch -d C I:/S/dirB",
    "!touch -r T/missingB I:/S/dirB",
    "!touch I:/old/newC",
    "touch I:/S/dirC",
    "!truncate -s C I:/S/dirB/fileB",
    "!truncate -s 5 I:/S/dirB",
    "truncate -s +1 I:/S/dirB/fileB",
    "!rm I:/missingC",
    "export -f T/tar I:/",
    "import T/tar I:/unpackedB",
    "import --json T/tar I:/unpackedC",
    "!import T/tar I:/S/dirB/fileB",
    "!export -f T/none I:/missingB",
    "!import T/missingB I:/",
    "inspect dump-tree I",
    "inspect dump-tree --json I",
    "inspect dump-super -f I",
    "inspect dump-super --json I",
    "inspect map I",
    "inspect map --json I",
    "inspect map --svg - I",
    "check I",
    "check --json I",
    "stats I",
    "stats --json I",
    "mkfs -b 134217728 -L labelK T/imgC",
    "mkfs -b 134217728 --json -L labelK T/img2C",
    "mkfs -b 134217728 -r T/copyB T/img3C",
    "!mkfs -b 134217728 T/imgC",
    "!mount T/imgC T/missingC",
    "!umount T/missingC",
    "!rescue super-recover T/missingC",
    "!tune -m T/missingC",
    "!tune -M labelK T/imgC",
];

/// Commands that print no names of files and subvolumes when they succeed or fail.
const WITHOUT_NAMES: &[&str] = &[
    "balance cancel",
    "balance pause",
    "balance resume",
    "scrub cancel",
    "scrub limit",
    "scrub resume",
    "filesystem resize",
    "filesystem trim",
    "inspect min-dev-size",
    "inspect tree-stats",
    "qgroup assign",
    "qgroup clear-stale",
    "qgroup create",
    "qgroup destroy",
    "qgroup remove",
    "quota rescan",
    "quota status",
    "top",
];

fn os(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// Replaces the letters of a line by the paths that they mean.
struct Words<'w> {
    letters: &'w [(char, Vec<u8>)],
    address: &'w str,
}

impl Words<'_> {
    fn of(&self, line: &str) -> Vec<OsString> {
        let word = |word: &str| {
            if word == "ADDRESS" {
                return OsString::from(self.address);
            }
            if word.starts_with('-') {
                return OsString::from(word);
            }
            let mut bytes = Vec::new();
            for letter in word.chars() {
                match self.letters.iter().find(|(of, _)| *of == letter) {
                    Some((_, meaning)) => bytes.extend(meaning),
                    None => bytes.extend(letter.to_string().as_bytes()),
                }
            }
            os(&bytes)
        };
        line.trim_start_matches('!').split(' ').map(word).collect()
    }
}

/// Fails if an output holds a control character other than the end of a line, a tab or a replacement character.
#[track_caller]
fn assert_harmless(line: &str, output: &[u8], is_table: bool) {
    let shown = String::from_utf8(output.to_vec()).unwrap_or_else(|_| panic!("{line}: {}", output.escape_ascii()));
    let is_hidden = |c: char| c.is_control() || "\u{202e}\u{2066}\u{200b}\u{2029}\u{fffd}".contains(c);
    let is_harmless = |c: char| c == '\n' || c == '\t' && is_table || !is_hidden(c);
    assert!(shown.chars().all(is_harmless), "{line}: {}", output.escape_ascii());
}

/// Reads the JSON documents of an output, and collects the bytes of their names.
fn names_in_json(line: &str, output: &[u8], names: &mut BTreeSet<Vec<u8>>) {
    for value in serde_json::Deserializer::from_slice(output).into_iter::<Value>() {
        collect(&value.unwrap_or_else(|error| panic!("{line}: {error}: {}", output.escape_ascii())), names);
    }
}

/// Collects the names in JSON as docs/guide/images.md says: `NAME_hex` if there is one, else `NAME`.
fn collect(value: &Value, names: &mut BTreeSet<Vec<u8>>) {
    let bytes = |hex: &str| -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    };
    let add = |value: &Value, is_hex: bool, names: &mut BTreeSet<Vec<u8>>| {
        let list = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
        for text in list.iter().filter_map(Value::as_str) {
            names.insert(if is_hex { bytes(text) } else { text.as_bytes().to_vec() });
        }
    };
    match value {
        Value::Array(list) => list.iter().for_each(|value| collect(value, names)),
        Value::Object(fields) => {
            for (name, value) in fields {
                match fields.get(&format!("{name}_hex")) {
                    Some(exact) => add(exact, true, names),
                    None => add(value, false, names),
                }
                collect(value, names);
            }
        }
        _ => {}
    }
}

/// Runs lines, and returns the names in their JSON.
fn run(lines: &[&str], words: &Words<'_>) -> BTreeSet<Vec<u8>> {
    let mut names = BTreeSet::new();
    for line in lines {
        let args = words.of(line);
        let output: Output = ubtrfs(&args);
        assert_eq!(output.status.success(), !line.starts_with('!'), "{line}: {:?} {output:?}", args);
        let is_table = !line.contains("--json");
        assert_harmless(line, &output.stdout, is_table && !line.contains("-f T"));
        assert_harmless(line, &output.stderr, false);
        if line.contains("--json") {
            names_in_json(line, &output.stdout, &mut names);
        }
    }
    names
}

/// Makes the files of a subvolume with the root directory `top`.
fn fill(top: &Path) {
    for name in [CONTROLS, BYTES] {
        let dir = top.join(os(&[b"dir", name].concat()));
        fs::create_dir(&dir).unwrap();
        let file = dir.join(os(&[b"file", name].concat()));
        fs::write(&file, vec![name[0]; 100_000]).unwrap();
        rustix::fs::setxattr(&file, os(&[b"user.", name].concat()), b"value", rustix::fs::XattrFlags::CREATE).unwrap();
        fs::create_dir_all(top.join("links")).unwrap();
        symlink(os(&[b"to", name].concat()), top.join("links").join(os(&[b"link", name].concat()))).unwrap();
    }
}

fn run_os(args: &[&OsStr]) {
    ok(ubtrfs(args));
}

/// Makes the filesystem that [`LINES`] describe.
fn made() -> Image {
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let dir = TempDir::new().unwrap();
    ok(ubtrfs(["mount", &text(image.path()), &text(dir.path())]));
    let subvolume = dir.path().join(os(BYTES));
    let (old, new) = (dir.path().join("old"), dir.path().join("new"));
    let create = ["subvolume", "create"].map(OsStr::new);
    let snapshot = ["subvolume", "snapshot", "-r"].map(OsStr::new);
    let output = ubtrfs([create[0], create[1], subvolume.as_os_str()]);
    assert!(output.status.success(), "{output:?}");
    let other = dir.path().join(os(CONTROLS));
    assert!(ubtrfs([create[0], create[1], other.as_os_str()]).status.success());
    fill(&subvolume);
    assert!(ubtrfs(snapshot.into_iter().chain([subvolume.as_os_str(), old.as_os_str()])).status.success());
    let moved = subvolume.join(os(&[b"moved", BYTES].concat()));
    fs::create_dir(&moved).unwrap();
    let file = subvolume.join(os(&[b"dir", CONTROLS].concat())).join(os(&[b"file", CONTROLS].concat()));
    fs::write(&file, "changed").unwrap();
    rustix::fs::setxattr(&file, os(&[b"user.x", BYTES].concat()), b"v", rustix::fs::XattrFlags::CREATE).unwrap();
    fs::hard_link(&file, moved.join(os(CONTROLS))).unwrap();
    let links = subvolume.join("links");
    fs::rename(links.join(os(&[b"link", BYTES].concat())), moved.join("link")).unwrap();
    symlink(os(BYTES), links.join(os(&[b"link", BYTES].concat()))).unwrap();
    assert!(ubtrfs(snapshot.into_iter().chain([subvolume.as_os_str(), new.as_os_str()])).status.success());
    for name in ["into", "into2"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    run_os(&[OsStr::new("umount"), dir.path().as_os_str()]);
    image
}

/// The address of an extent of the file with the name `BYTES`.
fn address(image: &Path) -> String {
    let file = [image.as_os_str().as_bytes(), b":/", BYTES, b"/dir", BYTES, b"/file", BYTES].concat();
    let args = [OsStr::new("filesystem"), OsStr::new("fiemap"), OsStr::new("--json"), &os(&file)];
    let extents: Value = serde_json::from_str(&ok(ubtrfs(args))).unwrap();
    extents[0]["address"].to_string()
}

/// The letters of a line, for a filesystem with paths that start with `top`.
fn letters(filesystem: &OsStr, top: &[u8], host: &Path) -> Vec<(char, Vec<u8>)> {
    vec![
        ('F', filesystem.as_bytes().to_vec()),
        ('I', filesystem.as_bytes().to_vec()),
        ('M', top.to_vec()),
        ('S', BYTES.to_vec()),
        ('O', b"old".to_vec()),
        ('N', b"new".to_vec()),
        ('T', host.as_os_str().as_bytes().to_vec()),
        ('C', CONTROLS.to_vec()),
        ('B', BYTES.to_vec()),
        ('K', LABEL.to_vec()),
    ]
}

/// Names that JSON must have given exactly.
fn assert_exact(names: &BTreeSet<Vec<u8>>, parts: &[&[&[u8]]]) {
    for part in parts {
        let wanted = part.concat();
        let found = names.iter().any(|name| name.windows(wanted.len()).any(|window| window == wanted));
        assert!(found, "{} is missing", wanted.escape_ascii());
    }
}

#[test]
fn no_command_passes_control_characters_of_names_on() {
    if !capability::kernel_oracle() || !capability::fuse() {
        return;
    }
    let image = made();
    let host = TempDir::new().unwrap();
    let path = image.path().as_os_str();
    let address = address(image.path());
    let dir = TempDir::new().unwrap();
    // Copies, because the lines change the filesystem.
    for (place, lines) in [("mount", LINES), ("image", LINES), ("image", IMAGE_LINES)] {
        let copy: PathBuf = host.path().join("copy.img");
        fs::copy(image.path(), &copy).unwrap();
        let host = host.path().join(format!("{place}{}", lines.len()));
        fs::create_dir(&host).unwrap();
        fs::write(host.join("script"), "ls -lR :/\n").unwrap();
        fs::write(host.join("wrong-script"), [b"rm ':/missing", BYTES, b"'\n"].concat()).unwrap();
        let names = match place {
            "mount" => {
                ok(ubtrfs(["mount", &text(&copy), &text(dir.path())]));
                let letters = letters(dir.path().as_os_str(), dir.path().as_os_str().as_bytes(), &host);
                let names = run(lines, &Words { letters: &letters, address: &address });
                ok(ubtrfs(["umount", &text(dir.path())]));
                names
            }
            _ => {
                let letters = letters(copy.as_os_str(), &[copy.as_os_str().as_bytes(), b":"].concat(), &host);
                run(lines, &Words { letters: &letters, address: &address })
            }
        };
        btrfs_check(&copy).unwrap();
        let in_both: &[&[&[u8]]] = &[&[b"dir", BYTES, b"/file", BYTES], &[b"dir", CONTROLS, b"/file", CONTROLS]];
        assert_exact(&names, in_both);
        match lines == IMAGE_LINES {
            true => {
                assert_exact(&names, &[&[b"to", BYTES], &[b"to", CONTROLS], &[b"user.", BYTES], &[b"user.", CONTROLS]])
            }
            false => assert_exact(&names, &[&[b"moved", BYTES, b"/", CONTROLS], &[b"user.x", BYTES]]),
        }
    }
    assert!(image.path().as_os_str() == path);
}

#[test]
fn different_names_have_different_texts() {
    let dir = TempDir::new().unwrap();
    let image = text(&dir.path().join("a.img"));
    ok(ubtrfs(["mkfs", "-q", "-b", "128M", &image]));
    let names: [&[u8]; 6] = [b"a\nb", b"a\\nb", b"a\\\\nb", b"a\xff", b"a\\xff", "a\u{202e}".as_bytes()];
    for name in names {
        run_os(&[OsStr::new("mkdir"), &os(&[image.as_bytes(), b":/", name].concat())]);
    }
    let listed = ok(ubtrfs(["ls", &format!("{image}:/")]));
    let mut lines: Vec<&str> = listed.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, [r"a\\\\nb", r"a\\nb", r"a\\xff", r"a\nb", r"a\u{202e}", r"a\xff"]);
    // A message with such a name escapes it once.
    let refused = ubtrfs([OsStr::new("cat"), &os(&[image.as_bytes(), b":/", b"a\\nb"].concat())]);
    assert!(String::from_utf8(refused.stderr.clone()).unwrap().contains(r":/a\\nb"), "{refused:?}");
}

#[test]
fn the_path_of_an_image_is_escaped() {
    let dir = TempDir::new().unwrap();
    let image = dir.path().join(os("a\u{1b}[2J\u{9b}\u{202e}\\.img".as_bytes()));
    let path = image.to_str().unwrap();
    let escaped = format!("{}/a\\u{{1b}}[2J\\u{{9b}}\\u{{202e}}\\\\.img", text(dir.path()));
    ok(ubtrfs(["mkfs", "-q", "-b", "128M", path]));
    for words in [
        &["filesystem", "show"][..],
        &["filesystem", "usage"],
        &["device", "stats"],
        &["device", "stats", "-T"],
        &["rescue", "super-recover", "-v"],
    ] {
        let shown = ok(ubtrfs(words.iter().chain(&[path])));
        assert_harmless(&words.join(" "), shown.as_bytes(), true);
        assert!(shown.contains(&escaped), "{words:?}: {shown}");
    }
    for words in [&["filesystem", "show", "--json"][..], &["device", "stats", "--json"]] {
        let shown = ok(ubtrfs(words.iter().chain(&[path])));
        assert_harmless(&words.join(" "), shown.as_bytes(), true);
        let mut names = BTreeSet::new();
        names_in_json(&words.join(" "), shown.as_bytes(), &mut names);
        assert!(names.contains(path.as_bytes()), "{words:?}: {shown}");
    }
    for words in [&["mkfs", "-q", "-b", "64K"][..], &["mkfs", "-q", "-b", "128M"], &["ls", "-o", "bogus"]] {
        let refused = ubtrfs(words.iter().chain(&[path]));
        assert!(!refused.status.success());
        assert_harmless(&words.join(" "), &refused.stderr, false);
    }
}

#[test]
fn the_lines_cover_every_command() {
    let commands = crate::common::all_commands();
    let is_covered = |command: &String| {
        let runs = |line: &&str| line.trim_start_matches('!').starts_with(&format!("{command} "));
        LINES.iter().chain(IMAGE_LINES).any(runs) || WITHOUT_NAMES.contains(&command.as_str())
    };
    let missing: Vec<&String> = commands.iter().filter(|command| !is_covered(command)).collect();
    assert!(missing.is_empty(), "no line runs {missing:?}");
}
