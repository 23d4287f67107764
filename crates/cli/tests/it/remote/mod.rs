//! Tests of `push`, `pull` and `remote` with a directory as the store; module `s3` uses a real server of S3.
//!
//! Method: images with snapshots are pushed, the store is damaged or the program killed, and what is pulled into new
//! images is compared by `ubtrfs diff` and checked by `btrfs check`; once it is compared by Linux.
//! `UBTRFS_REMOTE_KILLS=50` makes more kills; `UBTRFS_SEED` chooses other moments.

mod s3;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use ubtrfs_testkit::{Image, LoopMount, Rng, SendOptions, SnapshotChain, btrfs_check, capability};

use crate::common::{ok, refused, text, ubtrfs};

/// A directory with images and stores.
pub(super) struct Bed {
    dir: TempDir,
    /// The store.
    pub(super) url: String,
    /// Variables of the environment.
    env: Vec<(String, String)>,
}

impl Bed {
    pub(super) fn new() -> Self {
        let dir = TempDir::with_prefix("ubtrfs-remote-").unwrap();
        let url = format!("file://{}", text(&dir.path().join("store")));
        Self { dir, url, env: Vec::new() }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The command line, in which `URL` stands for the store; it runs in the directory.
    pub(super) fn command(&self, line: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "300", env!("CARGO_BIN_EXE_ubtrfs")]);
        command.args(line.split(' ').map(|word| if word == "URL" { &self.url } else { word }));
        command.env("LC_ALL", "C").envs(self.env.iter().cloned());
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    pub(super) fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    #[track_caller]
    pub(super) fn ok(&self, line: &str) -> String {
        ok(self.run(line))
    }

    #[track_caller]
    pub(super) fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.ok(line)).unwrap()
    }

    /// Makes the image `a.img` with the subvolume `/home`, which has a file of this size.
    pub(super) fn make_source(&self, len: usize) {
        fs::create_dir(self.path("tree")).unwrap();
        fs::write(self.path("tree/big"), Rng::new(3).content(len)).unwrap();
        fs::write(self.path("tree/small"), "small").unwrap();
        self.ok("mkfs -q -b 2G a.img");
        self.ok("subvolume create a.img:/home");
        self.ok("cp -r tree a.img:/home/tree");
    }

    /// Changes the source, and makes a snapshot of it.
    pub(super) fn snapshot(&self, name: &str) {
        fs::write(self.path("changed"), format!("text of {name}").repeat(1000)).unwrap();
        self.ok(&format!("cp changed a.img:/home/{name}"));
        self.ok(&format!("subvolume snapshot -r a.img:/home a.img:/{name}"));
    }

    pub(super) fn make_destination(&self) {
        self.ok("mkfs -q -b 2G b.img");
    }

    /// Fails unless the destination has these snapshots, complete and equal.
    #[track_caller]
    pub(super) fn check(&self, names: &[&str]) {
        btrfs_check(&self.path("b.img")).unwrap();
        let list = self.json("subvolume list --json b.img");
        let subvolumes = list.as_array().cloned().unwrap_or_else(|| list["subvolumes"].as_array().unwrap().clone());
        let paths: Vec<&str> = subvolumes.iter().map(|info| info["path"].as_str().unwrap()).collect();
        assert_eq!(paths, names);
        for name in names {
            self.ok(&format!("diff a.img:/{name} b.img:/{name}"));
            let shown = self.ok(&format!("subvolume show b.img:/{name}"));
            assert!(shown.contains("readonly"), "{shown}");
        }
    }

    /// The objects of the store below a folder.
    fn objects(&self, folder: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut waiting = vec![self.path("store").join(folder)];
        while let Some(dir) = waiting.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                match entry.file_type().unwrap().is_dir() {
                    true => waiting.push(entry.path()),
                    false => found.push(entry.path()),
                }
            }
        }
        found.sort();
        found
    }
}

fn new_key(path: &Path) {
    use age::secrecy::ExposeSecret;
    fs::write(path, age::x25519::Identity::generate().to_string().expose_secret()).unwrap();
}

#[test]
fn snapshots_go_through_a_store_and_come_back() {
    for key in [None, Some("key")] {
        let mut bed = Bed::new();
        if let Some(key) = key {
            new_key(&bed.path(key));
            bed.env.push(("UBTRFS_IDENTITY_FILE".to_owned(), text(&bed.path(key))));
        }
        bed.make_source(5 << 20);
        bed.snapshot("monday");
        bed.snapshot("tuesday");
        bed.snapshot("wednesday");
        assert!(bed.ok("push --part-size 1M a.img:/monday URL").starts_with("pushed monday (whole): "));
        assert_eq!(bed.ok("push a.img:/monday URL"), "monday is in the store already\n");
        // Whoever may not read the filesystem may not read its copy.
        let mode = fs::metadata(bed.objects("parts").remove(0)).unwrap().permissions().mode();
        assert_eq!(mode & 0o77, 0, "{mode:o}");
        let tuesday = bed.json("push --json --part-size 1M a.img:/tuesday URL");
        assert!(tuesday["stream_bytes"].as_u64().unwrap() < 100_000, "only the difference: {tuesday}");
        assert!(tuesday["parent"].is_object());
        bed.ok("push -q --part-size 1M a.img:/wednesday URL");
        let list = bed.json("remote list --json URL");
        let names: Vec<&str> =
            list["snapshots"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["wednesday", "tuesday", "monday"]);
        assert_eq!(bed.ok("remote list URL").lines().count(), 4);
        assert!(bed.ok("remote verify URL").contains("monday: 6 parts are good"));
        bed.ok("remote verify --quick -q URL monday");
        // A pull brings what is missing, and nothing else.
        bed.make_destination();
        assert_eq!(bed.ok("pull URL monday b.img").lines().count(), 1);
        assert_eq!(bed.ok("pull --verify URL latest b.img").lines().count(), 2);
        assert_eq!(bed.ok("pull URL wednesday b.img:/"), "the snapshot is here already\n");
        bed.check(&["monday", "tuesday", "wednesday"]);
        // A pulled snapshot has the identity of the pushed one.
        assert_eq!(bed.ok("push b.img:/tuesday URL"), "tuesday is in the store already\n");
        // A push of a changed copy sends only the difference.
        bed.ok("subvolume snapshot b.img:/wednesday b.img:/draft");
        bed.ok("cp changed b.img:/draft/later");
        bed.ok("subvolume snapshot -r b.img:/draft b.img:/later");
        let later = bed.json("push --json b.img:/later URL");
        assert!(later["stream_bytes"].as_u64().unwrap() < 100_000, "{later}");
    }
}

#[test]
fn a_mount_pushes_and_pulls() {
    if !capability::fuse() {
        return;
    }
    let bed = Bed::new();
    bed.make_source(3 << 20);
    bed.snapshot("monday");
    bed.snapshot("tuesday");
    bed.make_destination();
    fs::create_dir(bed.path("from")).unwrap();
    fs::create_dir(bed.path("to")).unwrap();
    bed.ok("mount a.img from");
    bed.ok("mount b.img to");
    bed.ok("push -q from/monday URL");
    bed.ok("push -q -p from/monday from/tuesday URL");
    bed.ok("pull -q --verify URL tuesday to");
    let tuesday = bed.path("to/tuesday/tree/big");
    assert_eq!(fs::read(tuesday).unwrap(), fs::read(bed.path("tree/big")).unwrap());
    bed.ok("umount from to");
    bed.check(&["monday", "tuesday"]);
}

#[test]
fn linux_finds_what_it_sent() {
    if !capability::kernel_oracle() {
        return;
    }
    let chain = SnapshotChain::make(6, 3, 200).unwrap();
    let bed = Bed::new();
    bed.ok("mkfs -q -b 1G a.img");
    for nr in 0..3_usize {
        let how = SendOptions { proto: 2, compressed_data: true, parent: nr.checked_sub(1), ..SendOptions::default() };
        let stream = chain.send(nr, &how).unwrap();
        ok(ubtrfs(["receive", "-q", "-f", &text(stream.path()), &text(&bed.path("a.img"))]));
        bed.ok(&format!("push -q --part-size 64K a.img:/s{nr} URL"));
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    bed.ok(&format!("pull -q --verify URL s2 {}", text(image.path())));
    btrfs_check(image.path()).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    chain.compare(mount.path()).unwrap();
    mount.close().unwrap();
}

#[test]
fn a_damaged_store_gives_an_error_and_no_half_snapshot() {
    let bed = Bed::new();
    bed.make_source(3 << 20);
    bed.snapshot("monday");
    bed.snapshot("tuesday");
    bed.ok("push -q --part-size 256K a.img:/monday URL");
    bed.ok("push -q --part-size 256K a.img:/tuesday URL");
    bed.make_destination();
    let monday = bed.json("remote list --json URL")["snapshots"][1]["uuid"].as_str().unwrap().to_owned();
    let parts: Vec<PathBuf> = bed.objects("parts").into_iter().filter(|path| text(path).contains(&monday)).collect();
    assert!(parts.len() > 10);
    let good: Vec<Vec<u8>> = parts.iter().map(|path| fs::read(path).unwrap()).collect();
    let last = parts.len() - 1;
    let cases: [(usize, Option<Vec<u8>>, &str); 5] = [
        (0, Some(vec![0; good[0].len()]), "is damaged: its SHA-256 is"),
        (5, Some(good[6].clone()), "in place of part 5"),
        (3, Some(good[3][1..].to_vec()), "bytes instead of"),
        (last, None, "it does not exist"),
        (last, Some(good[0].clone()), "is damaged"),
    ];
    for (nr, bytes, words) in cases {
        match bytes {
            Some(bytes) => fs::write(&parts[nr], bytes).unwrap(),
            None => fs::remove_file(&parts[nr]).unwrap(),
        }
        let output = bed.run("pull URL tuesday b.img");
        refused(&output, &["cannot pull monday", &format!("{nr:08}-"), words]);
        bed.check(&[]);
        let verified = bed.run("remote verify URL");
        let (status, said) = (verified.status.code(), String::from_utf8_lossy(&verified.stdout).into_owned());
        assert_eq!(status, Some(1));
        assert!(said.contains("tuesday: ") && said.contains("monday: ") && said.contains("00000"), "{said}");
        fs::write(&parts[nr], &good[nr]).unwrap();
    }
    // An interrupted pull leaves complete snapshots, and the next one goes on.
    let manifests = bed.objects("snapshots");
    let tuesday = manifests.iter().find(|path| !text(path).contains(&monday)).unwrap();
    let manifest = fs::read(tuesday).unwrap();
    fs::write(tuesday, &manifest[..manifest.len() / 2]).unwrap();
    let output = bed.run("pull URL tuesday b.img");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("is damaged"), "{stderr}");
    bed.check(&[]);
    fs::write(tuesday, &manifest).unwrap();
    bed.ok("pull -q URL tuesday b.img");
    bed.check(&["monday", "tuesday"]);
}

#[test]
fn a_manifest_with_another_stream_receives_nothing() {
    let bed = Bed::new();
    bed.make_source(100_000);
    bed.snapshot("monday");
    bed.ok("push -q a.img:/monday URL");
    bed.make_destination();
    let path = bed.objects("snapshots").remove(0);
    let manifest = fs::read_to_string(&path).unwrap();
    let json = manifest.lines().next().unwrap();
    // Whoever can write to a store that is not encrypted can also write the checksum of a manifest.
    let proven = |json: &str| format!("{json}\nsha256 {}\n", sha256(json.as_bytes()));
    assert_eq!(proven(json), manifest);
    for (from, to, words) in [
        ("\"name\":\"monday\"", "\"name\":\"friday\"", "does not make the snapshot friday"),
        ("\"name\":\"monday\"", "\"name\":\"../x\"", "no possible name"),
        ("\"version\":1", "\"version\":2", "use a newer ubtrfs"),
        ("\"parts\":[", "\"parts\":[null,", "does not follow the format"),
        ("\"stream_bytes\":", "\"stream_bytes\":9", "do not add up"),
    ] {
        assert!(json.contains(from), "{json}");
        fs::write(&path, proven(&json.replace(from, to))).unwrap();
        let key = path.file_stem().unwrap().to_str().unwrap();
        let output = bed.run(&format!("pull URL {key} b.img"));
        refused(&output, &[words]);
        bed.check(&[]);
    }
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn keys_must_fit_and_secrets_are_not_printed() {
    let bed = Bed::new();
    bed.make_source(100_000);
    bed.snapshot("monday");
    bed.snapshot("tuesday");
    new_key(&bed.path("key"));
    new_key(&bed.path("other"));
    bed.ok("push -q -i key a.img:/monday URL");
    bed.make_destination();
    refused(&bed.run("push a.img:/tuesday URL"), &["is encrypted; give the file with your secret key: --identity"]);
    refused(&bed.run("pull URL monday b.img"), &["is encrypted"]);
    refused(&bed.run("pull -i a.img URL monday b.img"), &["cannot read the keys in a.img"]);
    let output = bed.command("push a.img:/tuesday URL").env("UBTRFS_IDENTITY_FILE", "").output().unwrap();
    refused(&output, &["UBTRFS_IDENTITY_FILE is empty"]);
    let key = bed.run("pull -i AGE-SECRET-KEY-1ABC URL monday b.img");
    refused(&key, &["give the file that has the secret key"]);
    assert!(!String::from_utf8_lossy(&key.stderr).contains("1ABC"));
    refused(&bed.run("pull -i tree/small URL monday b.img"), &["AGE-SECRET-KEY-1..."]);
    let output = bed.run("pull -i other URL monday b.img");
    assert!(String::from_utf8_lossy(&output.stderr).contains("is encrypted for other keys"));
    bed.ok("pull -q -i key URL monday b.img");
    bed.check(&["monday"]);
    // Credentials of the environment do not appear when a store cannot be reached.
    for (name, value) in [
        ("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE"),
        ("AWS_SECRET_ACCESS_KEY", "hunter2hunter2"),
        ("AWS_SESSION_TOKEN", "token-of-session"),
        ("AWS_ENDPOINT", "http://127.0.0.1:1"),
        ("AWS_ALLOW_HTTP", "true"),
    ] {
        let output = bed.command("remote list s3://bucket/x?sig=hunter2hunter2").env(name, value).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && !stderr.contains("hunter2"), "{stderr}");
    }
    refused(&bed.run("remote list http://host/x"), &["write s3://BUCKET/PREFIX"]);
    refused(&bed.run("remote list s3://key:hunter2@bucket/x"), &["s3://bucket/x", "in the environment"]);
}

#[test]
fn a_prune_keeps_what_the_rules_say() {
    let bed = Bed::new();
    bed.make_source(1 << 20);
    for name in ["one", "two", "three", "four"] {
        bed.snapshot(name);
    }
    for name in ["one", "two"] {
        bed.ok(&format!("push -q --zstd 0 a.img:/{name} URL"));
    }
    bed.ok("push -q --full a.img:/three URL");
    bed.ok("push -q a.img:/four URL");
    refused(&bed.run("remote prune URL"), &["no rule would keep a snapshot"]);
    let dry = bed.ok("remote prune -n --keep-last 1 URL");
    let verbs: Vec<String> = dry.lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(verbs, ["keep", "keep", "remove", "remove", "would"], "{dry}");
    assert!(dry.contains("three  needed by "), "{dry}");
    assert_eq!(bed.ok("remote list URL").lines().count(), 5, "nothing was removed");
    let done = bed.json("remote prune --json --keep-last 1 URL");
    assert!(done["freed_bytes"].as_u64().unwrap() > 1 << 20, "{done}");
    assert_eq!(bed.ok("remote list URL").lines().count(), 3);
    bed.ok("remote verify -q URL");
    bed.make_destination();
    bed.ok("pull -q URL four b.img");
    bed.check(&["three", "four"]);
}

#[test]
fn snapshots_are_named_by_the_beginning_of_their_uuid() {
    let bed = Bed::new();
    bed.make_source(1000);
    for dir in ["day", "night"] {
        bed.ok(&format!("mkdir a.img:/{dir}"));
        bed.ok(&format!("subvolume snapshot -r a.img:/home a.img:/{dir}/monday"));
        bed.ok(&format!("push -q --full a.img:/{dir}/monday URL"));
    }
    let list = bed.json("remote list --json URL");
    let uuids: Vec<&str> =
        list["snapshots"].as_array().unwrap().iter().map(|one| one["uuid"].as_str().unwrap()).collect();
    bed.make_destination();
    refused(&bed.run("pull URL monday b.img"), &["2 snapshots monday", "by its UUID"]);
    refused(&bed.run(&format!("pull URL {} b.img", &uuids[0][..3])), &["no readable snapshot"]);
    bed.ok(&format!("pull -q URL {} b.img", &uuids[0][..10].to_uppercase()));
    // One name has room for one of them.
    let other = format!("pull URL {} b.img", &uuids[1][..10]);
    refused(&bed.run(&other), &["'monday' exists already", "pull into another directory"]);
    bed.ok("mkdir b.img:/other");
    bed.ok(&format!("{other}:/other"));
}

#[test]
fn a_parent_that_needs_the_snapshot_is_refused() {
    let bed = Bed::new();
    bed.make_source(100_000);
    bed.snapshot("one");
    bed.snapshot("two");
    refused(&bed.run("push -p a.img:/one a.img:/two URL"), &["the store does not have a.img:/one"]);
    bed.ok("push -q a.img:/one URL");
    bed.ok("push -q a.img:/two URL");
    refused(&bed.run("push -p a.img:/two a.img:/one URL"), &["it needs the snapshot that is to be pushed"]);
    refused(&bed.run("push -p a.img:/one a.img:/one URL"), &["cannot be its own parent"]);
    refused(&bed.run("push a.img:/home URL"), &["is not read-only"]);
    bed.ok("push -q --again a.img:/one URL");
    bed.make_destination();
    bed.ok("pull -q URL two b.img");
    bed.check(&["one", "two"]);
}

#[test]
fn one_percent_of_changes_moves_at_most_one_and_a_half() {
    let bed = Bed::new();
    let len = 64 << 20;
    bed.make_source(len);
    bed.snapshot("one");
    let whole = bed.json("push --json --zstd 0 a.img:/one URL")["uploaded_bytes"].as_u64().unwrap();
    // One percent of the blocks, spread over the file.
    let mut bytes = fs::read(bed.path("tree/big")).unwrap();
    let mut rng = Rng::new(5);
    for block in (0..len / 4096).filter(|block| block % 100 == 7) {
        bytes[block * 4096..(block + 1) * 4096].copy_from_slice(&rng.content(4096));
    }
    if !capability::fuse() {
        return;
    }
    fs::create_dir(bed.path("from")).unwrap();
    bed.ok("mount a.img from");
    {
        use std::os::unix::fs::FileExt;
        let file = fs::File::options().write(true).open(bed.path("from/home/tree/big")).unwrap();
        for block in (0..len / 4096).filter(|block| block % 100 == 7) {
            file.write_all_at(&bytes[block * 4096..(block + 1) * 4096], block as u64 * 4096).unwrap();
        }
    }
    bed.ok("umount from");
    bed.ok("subvolume snapshot -r a.img:/home a.img:/two");
    let moved = bed.json("push --json --zstd 0 a.img:/two URL")["uploaded_bytes"].as_u64().unwrap();
    assert!(moved * 1000 <= whole * 15, "{moved} of {whole} bytes");
    bed.make_destination();
    bed.ok("pull -q URL two b.img");
    bed.check(&["one", "two"]);
}

#[test]
fn a_prune_does_not_run_beside_a_push() {
    let bed = Bed::new();
    bed.make_source(100_000);
    bed.snapshot("monday");
    bed.snapshot("tuesday");
    bed.ok("push -q a.img:/monday URL");
    // The marks of programs that run elsewhere, or were killed.
    let mark = |name: &str| {
        let path = bed.path("store/marks").join(name);
        fs::write(&path, "").unwrap();
        path
    };
    let push = mark("push-one");
    refused(
        &bed.run("remote prune --keep-last 1 URL"),
        &["another push or prune works", "marks/push-one", "ten minutes"],
    );
    bed.ok("remote prune -n --keep-last 1 URL");
    bed.ok("push -q a.img:/tuesday URL");
    let prune = mark("prune-one");
    refused(&bed.run("push --full a.img:/tuesday URL"), &["marks/prune-one"]);
    // A mark that nobody writes again counts no more.
    let old = std::time::SystemTime::now() - Duration::from_secs(660);
    for path in [push, prune] {
        fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    bed.ok("push -q --full a.img:/tuesday URL");
    bed.ok("remote prune -q --keep-last 1 URL");
    assert_eq!(bed.objects("marks").len(), 2, "each command removes its own");
}

#[test]
fn a_push_takes_no_part_that_was_cut_and_no_manifest_that_cannot_be_read() {
    let bed = Bed::new();
    bed.make_source(4 << 20);
    bed.snapshot("monday");
    bed.ok("push -q --part-size 1M a.img:/monday URL");
    // As after a push that was interrupted.
    let manifest = bed.objects("snapshots").remove(0);
    fs::remove_file(&manifest).unwrap();
    let part = bed.objects("parts").remove(1);
    fs::File::options().write(true).open(&part).unwrap().set_len(1000).unwrap();
    assert_eq!(bed.json("push --json --part-size 1M a.img:/monday URL")["resumed_parts"], 4);
    bed.ok("remote verify -q URL");
    bed.make_destination();
    bed.ok("pull -q URL monday b.img");
    bed.check(&["monday"]);
    fs::write(&manifest, "").unwrap();
    refused(&bed.run("push a.img:/monday URL"), &["is damaged", "add --again"]);
    bed.ok("push -q --again a.img:/monday URL");
    bed.ok("remote verify -q URL");
}

#[test]
fn a_prune_removes_what_a_killed_push_was_writing() {
    let bed = Bed::new();
    bed.make_source(100_000);
    bed.snapshot("monday");
    bed.ok("push -q a.img:/monday URL");
    let part = bed.objects("parts").remove(0);
    let old = PathBuf::from(format!("{}#1", text(&part)));
    fs::write(&old, "half").unwrap();
    assert_eq!(bed.json("remote prune --json --keep-last 1 URL")["orphan_parts"], 0, "it is young");
    let days_ago = std::time::SystemTime::now() - Duration::from_secs(2 * 86_400);
    fs::File::options().write(true).open(&old).unwrap().set_modified(days_ago).unwrap();
    assert_eq!(bed.json("remote prune --json --keep-last 1 URL")["orphan_parts"], 1);
    assert!(!old.exists() && part.exists());
    bed.ok("remote verify -q URL");
}

#[test]
fn a_pipe_in_the_place_of_a_part_is_named_and_not_opened() {
    if !capability::program("mkfifo") {
        return;
    }
    let bed = Bed::new();
    bed.make_source(1 << 20);
    bed.snapshot("monday");
    bed.ok("push -q --part-size 256K a.img:/monday URL");
    bed.make_destination();
    let part = bed.objects("parts").pop().unwrap();
    fs::remove_file(&part).unwrap();
    ok(Command::new("mkfifo").arg(&part).output().unwrap());
    refused(&bed.run("pull URL monday b.img"), &["is damaged: it is no regular file"]);
    bed.check(&[]);
}

/// Starts a command and kills it after this time, unless it ends before. Returns whether it succeeded.
fn killed(bed: &Bed, line: &str, after: Duration) -> bool {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
    command.args(line.split(' ').map(|word| if word == "URL" { &bed.url } else { word }));
    command.envs(bed.env.iter().cloned()).current_dir(bed.dir.path()).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + after;
    while Instant::now() < end {
        if let Some(status) = child.try_wait().unwrap() {
            let mut said = String::new();
            std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
            assert!(status.success(), "{line}: {said}");
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    false
}

/// Kills pushes and pulls of two snapshots at random moments, until both ended.
pub(super) fn kill_rounds(bed: &Bed, nr_kills: usize) {
    let seed = std::env::var("UBTRFS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(11);
    eprintln!("UBTRFS_SEED={seed}");
    let mut rng = Rng::new(seed);
    let (mut kills, mut resumed) = (0, 0);
    let mut longest = Duration::from_millis(400);
    for line in ["push -q --part-size 1M a.img:/one URL", "push -q --part-size 1M a.img:/two URL"] {
        let begun = kills;
        loop {
            let enough = kills - begun >= nr_kills / 4;
            let after =
                if enough { Duration::from_secs(200) } else { longest.mul_f64(rng.below(1000) as f64 / 1000.0) };
            if killed(bed, line, after) {
                if enough || longest < Duration::from_millis(20) {
                    break;
                }
                // It was too fast to be killed: push again, with shorter times.
                longest = longest.mul_f64(0.7);
                if bed.url.starts_with("file:") {
                    let name = line.split("a.img:/").nth(1).unwrap().split(' ').next().unwrap();
                    forget(bed, name);
                }
                continue;
            }
            kills += 1;
            // A snapshot is there as a whole, or not at all.
            let verified = bed.run("remote verify -q --quick URL");
            assert!(verified.status.success(), "{verified:?}");
        }
    }
    bed.ok("remote verify -q URL");
    let pull = "pull -q URL two b.img";
    longest = Duration::from_millis(600);
    loop {
        let enough = kills >= nr_kills;
        let after = if enough { Duration::from_secs(200) } else { longest.mul_f64(rng.below(1000) as f64 / 1000.0) };
        let done = killed(bed, pull, after);
        btrfs_check(&bed.path("b.img")).unwrap();
        if done && enough {
            break;
        }
        if done {
            longest = longest.mul_f64(0.7);
            let _ = fs::remove_file(bed.path("b.img"));
            bed.make_destination();
            continue;
        }
        kills += 1;
        // A read-only subvolume is complete.
        for name in ["one", "two"] {
            let shown = bed.run(&format!("subvolume show b.img:/{name}"));
            if String::from_utf8_lossy(&shown.stdout).contains("readonly") {
                bed.ok(&format!("diff a.img:/{name} b.img:/{name}"));
                resumed += 1;
            }
        }
    }
    bed.check(&["one", "two"]);
    eprintln!("{kills} kills; in {resumed} rounds a complete snapshot was found");
}

/// Removes the manifest of a snapshot from the store.
fn forget(bed: &Bed, name: &str) {
    for path in bed.objects("snapshots") {
        if fs::read_to_string(&path).is_ok_and(|text| text.contains(&format!("\"name\":\"{name}\""))) {
            fs::remove_file(path).unwrap();
        }
    }
}

pub(super) fn nr_kills() -> usize {
    std::env::var("UBTRFS_REMOTE_KILLS").ok().and_then(|count| count.parse().ok()).unwrap_or(8)
}

#[test]
fn killed_pushes_and_pulls_are_continued() {
    let bed = Bed::new();
    bed.make_source(40 << 20);
    bed.snapshot("one");
    bed.snapshot("two");
    bed.make_destination();
    kill_rounds(&bed, nr_kills());
}
