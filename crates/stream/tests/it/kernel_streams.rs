//! Tests with streams of Linux's `btrfs send`, of versions 1 and 2: each command is parsed and encoded again, and must
//! equal the original byte for byte.

use std::collections::BTreeSet;
use std::path::Path;

use ubtrfs_stream::{CommandKind, FrameReader, StreamCommand, StreamVersion, encode, encode_header, parse};
use ubtrfs_testkit::{KernelImage, KernelImageSpec, LoopMount, capability, run};

/// Parses a stream, encodes the commands again, and compares the bytes. Returns the kinds of the commands.
fn again(stream: &[u8]) -> BTreeSet<CommandKind> {
    let mut reader = FrameReader::new(stream);
    let (mut bytes, mut written, mut kinds) = (Vec::new(), Vec::new(), BTreeSet::new());
    while let Some(version) = reader.stream().unwrap() {
        encode_header(version, &mut written);
        loop {
            bytes.clear();
            let header = reader.command(&mut bytes).unwrap().expect("Linux ends each stream with a command");
            header.verify(&bytes).unwrap();
            let command = parse(&header, &bytes).unwrap();
            let start = written.len();
            encode(version, &command, &mut written).unwrap();
            assert!(written[start..] == bytes, "{}: {command:?}", header.position);
            kinds.insert(command.kind());
            if command == StreamCommand::End {
                break;
            }
        }
    }
    assert!(written == stream);
    kinds
}

fn send(mount: &LoopMount, args: &[&str], subvolumes: &[&str]) -> Vec<u8> {
    let out = tempfile::NamedTempFile::new().unwrap();
    let file = out.path().to_str().unwrap().to_owned();
    let mut all: Vec<String> = ["send", "-q", "-f", &file].map(str::to_owned).to_vec();
    all.extend(args.iter().map(|arg| arg.replace("@", mount.path().to_str().unwrap())));
    all.extend(subvolumes.iter().map(|name| mount.join(name).to_str().unwrap().to_owned()));
    run("btrfs", all).unwrap();
    std::fs::read(out.path()).unwrap()
}

fn snapshot(mount: &LoopMount, name: &str) {
    let at = |path: &Path| path.to_str().unwrap().to_owned();
    run("btrfs", ["subvolume", "snapshot", "-r", &at(mount.path()), &at(&mount.join(name))]).unwrap();
}

#[test]
fn streams_of_linux_are_written_again_byte_for_byte() {
    if !capability::kernel_oracle() {
        return;
    }
    let made = KernelImage::rich(KernelImageSpec::DEFAULT, 1).unwrap();
    let mount = LoopMount::new(made.image.path(), "compress=zstd").unwrap();
    run("setfattr", ["-n", "user.old", "-v", "1", mount.join("files/large").to_str().unwrap()]).unwrap();
    snapshot(&mount, "one");
    let script = "cd \"$0\" && mv files renamed && rm -r links && setfattr -x user.old renamed/large && chattr +A renamed/large &&
        dd if=/dev/zero of=renamed/large bs=64k count=4 conv=notrunc status=none &&
        fallocate -p -o 4096 -l 8192 renamed/text-1000000 && cp --reflink=always renamed/large again &&
        mkfifo fifo && truncate -s 100 renamed/random-4097 && chown 1:2 fifo && chmod 6755 again &&
        mkdir emptied && sync -f .";
    run("sh", ["-c", script, mount.path().to_str().unwrap()]).unwrap();
    snapshot(&mount, "two");

    let mut kinds = BTreeSet::new();
    for proto in ["1", "2"] {
        kinds.extend(again(&send(&mount, &["--proto", proto], &["one"])));
        kinds.extend(again(&send(&mount, &["--proto", proto, "-p", "@/one"], &["two"])));
        kinds.extend(again(&send(&mount, &["--proto", proto, "--no-data", "-p", "@/one"], &["two"])));
        // Send several subvolumes: once with an `END` for each, and once with one `END` for all.
        kinds.extend(again(&send(&mount, &["--proto", proto, "-c", "@/one"], &["two", "one"])));
        kinds.extend(again(&send(&mount, &["--proto", proto, "-e"], &["one", "two"])));
    }
    kinds.extend(again(&send(&mount, &["--proto", "2", "--compressed-data"], &["one"])));
    mount.close().unwrap();

    // Linux 6.18 sends every command of versions 1 and 2.
    let missing: Vec<CommandKind> = CommandKind::ALL
        .iter()
        .filter(|kind| kind.since() <= StreamVersion::V2 && !kinds.contains(kind))
        .copied()
        .collect();
    assert!(missing.is_empty(), "no stream of Linux had {missing:?}");
}
