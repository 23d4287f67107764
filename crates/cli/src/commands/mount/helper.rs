//! Translates the command lines that mount(8) and umount(8) use for this program.
//!
//! | called as                                   | by                                           |
//! |---------------------------------------------|----------------------------------------------|
//! | `ubtrfs DEVICE DIR -o OPTIONS`              | mount.fuse3, for the type `fuse.ubtrfs`      |
//! | `mount.ubtrfs DEVICE DIR [-sfnv] [-o ...]`  | mount(8), for the type `ubtrfs`              |
//! | `mount.fuse.ubtrfs ...`                     | mount(8), for the type `fuse.ubtrfs`         |
//! | `umount.fuse.ubtrfs DIR [-flnrv]`           | umount(8), so that it waits for durability   |

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::Path;

use ubtrfs_device::is_url;

/// Rewrites the command lines of mount(8) and umount(8) to `ubtrfs mount ...` or `ubtrfs umount ...`. Leaves other
/// command lines unchanged.
pub(crate) fn as_mount_helper(args: Vec<OsString>, commands: &[String]) -> Vec<OsString> {
    let name = args.first().map(Path::new).and_then(Path::file_name).and_then(OsStr::to_str).unwrap_or_default();
    if name.starts_with("mount.") {
        return from_helper("mount", &args[1..]);
    }
    if name.starts_with("umount.") {
        return from_helper("umount", &args[1..]);
    }
    let is_dash = |arg: &OsString| arg.as_encoded_bytes().starts_with(b"-");
    let [_, device, dir, rest @ ..] = args.as_slice() else { return args };
    let is_command = device.to_str().is_some_and(|word| word == "help" || commands.iter().any(|name| name == word));
    let looks_like_mount = rest.iter().any(|arg| arg.as_encoded_bytes().starts_with(b"-o"))
        || device.as_encoded_bytes().contains(&b'/')
        || Path::new(device).exists();
    if is_dash(device) || is_dash(dir) || is_command || !looks_like_mount {
        return args;
    }
    from_helper("mount", &args[1..])
}

/// Who runs this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HelperCaller {
    /// mount(8) for all lines of fstab.
    MountAll,
    /// mount(8) for one mount.
    Mount,
    /// Anything else.
    Other,
}

impl HelperCaller {
    /// The parent of this process.
    pub(super) fn of_this_process() -> Self {
        let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
        let line = std::fs::read(format!("/proc/{parent}/cmdline")).unwrap_or_default();
        Self::of_line(line.split(|byte| *byte == 0))
    }

    fn of_line<'w>(mut words: impl Iterator<Item = &'w [u8]>) -> Self {
        if words.next().and_then(|name| name.rsplit(|byte| *byte == b'/').next()) != Some(b"mount") {
            return Self::Other;
        }
        // After a letter that takes a value, the rest of the word is the value.
        let has_letter =
            |letters: &[u8]| letters.iter().take_while(|letter| !b"LUoOtTN".contains(letter)).any(|c| *c == b'a');
        let is_for_all = words.any(|word| match word {
            [b'-', b'-', name @ ..] => name == b"all",
            [b'-', letters @ ..] => has_letter(letters),
            _ => false,
        });
        if is_for_all { Self::MountAll } else { Self::Mount }
    }
}

/// Whether the option `nofail` lets mount(8) pass over a device that does not exist. Where the kernel opens the device,
/// mount(8) itself does so, after the directory is found.
pub(super) fn passes_over(options: &[String], device: &Path) -> bool {
    let is_absent = || match std::fs::metadata(device) {
        Err(error) => matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
        Ok(_) => false,
    };
    options.iter().flat_map(|list| list.split(',')).any(|option| option == "nofail") && !is_url(device) && is_absent()
}

/// Drops options that only concern mount(8): -s sloppy, -n no mtab, -v verbose, -i no helper, -t type, -N namespace;
/// for umount also -r and -f. For mount, `-f` means a fake mount.
fn from_helper(command: &str, given: &[OsString]) -> Vec<OsString> {
    let mut out: Vec<OsString> = vec!["ubtrfs".into(), command.into()];
    let mut given = given.iter();
    while let Some(arg) = given.next() {
        let Some(flags) = arg.to_str().and_then(|arg| arg.strip_prefix('-')).filter(|flags| !flags.starts_with('-'))
        else {
            out.push(arg.clone());
            continue;
        };
        for (at, letter) in flags.char_indices() {
            let rest = &flags[at + letter.len_utf8()..];
            match (command, letter) {
                (_, 't' | 'N') => {
                    if rest.is_empty() {
                        given.next();
                    }
                    break;
                }
                (_, 'o') => {
                    out.push("-o".into());
                    if rest.is_empty() {
                        out.extend(given.next().cloned())
                    } else {
                        out.push(rest.into())
                    }
                    break;
                }
                ("mount", 'f') => out.push("--fake".into()),
                ("mount", 'r') => out.push("-r".into()),
                ("umount", 'l') => out.push("-l".into()),
                _ => {}
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> String {
        let args = line.split(' ').map(OsString::from).collect();
        let commands = ["mount".to_owned(), "umount".to_owned()];
        let out = as_mount_helper(args, &commands);
        out.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn calls_of_mount_are_understood() {
        assert_eq!(rewritten("ubtrfs /dev/x /mnt -o rw,dev,suid"), "ubtrfs mount /dev/x /mnt -o rw,dev,suid");
        assert_eq!(rewritten("ubtrfs img /mnt -o ro"), "ubtrfs mount img /mnt -o ro");
        assert_eq!(rewritten("/sbin/mount.ubtrfs /i /m -sn -o ro -t ubtrfs"), "ubtrfs mount /i /m -o ro");
        assert_eq!(rewritten("mount.fuse.ubtrfs /i /m -fv"), "ubtrfs mount /i /m --fake");
        assert_eq!(rewritten("/sbin/umount.fuse.ubtrfs /m -l"), "ubtrfs umount /m -l");
    }

    #[test]
    fn only_an_absent_device_may_fail() {
        let passes = |list: &str, device: &str| passes_over(&[list.to_owned()], Path::new(device));
        assert!(passes("rw,nofail", "/dev/no-such-device") && passes("nofail", "/dev/null/x"));
        assert!(!passes("rw", "/dev/no-such-device") && !passes("nofail", "/dev/null") && !passes("xnofail", "/no"));
    }

    #[test]
    fn mount_and_its_option_for_all_are_recognized() {
        let caller = |line: &str| HelperCaller::of_line(line.split(' ').map(str::as_bytes));
        for line in ["mount -a", "/bin/mount -vat ubtrfs", "mount -T fstab --all"] {
            assert_eq!(caller(line), HelperCaller::MountAll, "{line}");
        }
        for line in ["mount -t auto /i /m", "mount -oatime /i /m", "mount /a /m"] {
            assert_eq!(caller(line), HelperCaller::Mount, "{line}");
        }
        assert_eq!(caller("sh -a"), HelperCaller::Other);
    }

    #[test]
    fn commands_stay_commands() {
        for line in
            ["ubtrfs mount /i /m -o ro", "ubtrfs umount /m", "ubtrfs --version", "ubtrfs nonsense words", "ubtrfs"]
        {
            assert_eq!(rewritten(line), line);
        }
    }
}
