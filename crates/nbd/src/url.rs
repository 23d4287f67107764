//! [`NbdUrl`]: the URL of an export, as the page "NBD URI" of the protocol's documentation has it, or of an object that a
//! process of this machine serves as an export.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ubtrfs_format::print::escaped;

use crate::tls::TlsSettings;

/// The port of NBD servers.
const PORT: u16 = 10809;
/// Longest name of an export, as the protocol limits it, in bytes.
const NAME_MAX: usize = 4096;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServerAddress {
    /// A host, as a name or an IP address, and a port.
    Tcp(String, u16),
    /// A socket in the file system.
    Unix(PathBuf),
    /// The URL of an object, which a process serves that the object opener starts.
    Object(String),
}

/// The schemes of the URLs of objects.
const OBJECT_SCHEMES: [&[u8]; 5] = [b"https", b"http", b"s3", b"gs", b"az"];

/// The URL of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUrl {
    pub(crate) address: ServerAddress,
    /// The name of the export. The empty name means the server's default export.
    pub(crate) export: Vec<u8>,
    /// `Some` means that the connection needs TLS.
    pub(crate) tls: Option<TlsSettings>,
}

/// Why a text is no URL of an export that can be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// The scheme is unknown.
    #[error(
        "{0} has an unknown kind of NBD address; write nbd[s]://HOST[:PORT]/EXPORT or nbd[s]+unix:///EXPORT?socket=PATH"
    )]
    Scheme(String),
    /// The URL has a user or a password.
    #[error(
        "the NBD URL has a user name before its host, which only TLS with shared keys has, and this program does not; leave \
         it out, and give the client a certificate (tls-certificates=DIR)"
    )]
    User,
    /// The URL of an object has a user, a password or parameters.
    #[error(
        "the URL has a user name, or parameters behind '?', and messages would show them; leave them out, and put \
         credentials into the environment (AWS_ACCESS_KEY_ID and so on)"
    )]
    Secret,
    /// The URL of an object has no host or no name.
    #[error("{0} names no object; write https://HOST/PATH, s3://BUCKET/KEY, gs://BUCKET/KEY or az://CONTAINER/NAME")]
    NoObject(String),
    /// The URL has no host.
    #[error(
        "{0} names no host; write nbd://HOST[:PORT]/EXPORT, or nbd+unix:///EXPORT?socket=PATH for a socket on this machine"
    )]
    NoHost(String),
    /// The URL of a Unix socket has a host.
    #[error("{0} has a host and means a socket on this machine; write three slashes: nbd+unix:///EXPORT?socket=PATH")]
    HostOfSocket(String),
    /// The URL of a Unix socket does not name it.
    #[error("{0} names no socket; write nbd+unix:///EXPORT?socket=PATH")]
    NoSocket(String),
    /// The port is no number from 1 to 65535.
    #[error("{0} has a wrong port; write a number from 1 to 65535: nbd://HOST:PORT/EXPORT")]
    Port(String),
    /// A parameter behind `?` is unknown.
    #[error(
        "{url} has the unknown parameter '{name}'; nbd[s]+unix:// has socket=PATH, and nbds has tls-certificates=DIR and \
         tls-hostname=NAME"
    )]
    Parameter {
        /// The URL.
        url: String,
        /// The parameter.
        name: String,
    },
    /// A `%` is not followed by two hexadecimal digits, or a zero byte is encoded.
    #[error("{0} has a '%' without two hexadecimal digits; write %25 for a percent sign")]
    Escape(String),
    /// The name of the export is longer than the protocol permits.
    #[error("the NBD URL has an export name of {0} bytes, and the protocol permits 4096; shorten the name")]
    LongName(usize),
}

impl NbdUrl {
    /// Whether a path is meant as a URL of an export, possibly a wrong one.
    pub fn is_meant(path: &Path) -> bool {
        scheme(path.as_os_str().as_bytes()).is_some()
    }

    /// Parses a URL. `None` if the path is not meant as a URL ([`NbdUrl::is_meant`]).
    ///
    /// # Errors
    /// The URL is wrong.
    pub fn of_path(path: &Path) -> Option<Result<Self, UrlError>> {
        let bytes = path.as_os_str().as_bytes();
        scheme(bytes).map(|(scheme, rest)| match OBJECT_SCHEMES.contains(&scheme) {
            true => Self::parse_object(bytes, rest),
            false => Self::parse(scheme, rest, &escaped(bytes)),
        })
    }

    /// Whether this is the URL of an object, which can only be read.
    pub fn is_object(&self) -> bool {
        matches!(self.address, ServerAddress::Object(_))
    }

    /// Whether the URL names a socket or certificates by a path that another process may not find.
    pub fn has_relative_path(&self) -> bool {
        let is_relative = matches!(&self.address, ServerAddress::Unix(path) if path.is_relative());
        is_relative || self.tls.as_ref().is_some_and(TlsSettings::has_relative_path)
    }

    fn parse_object(bytes: &[u8], rest: &[u8]) -> Result<Self, UrlError> {
        let (host, name) = split_once(rest, b'/');
        if host.contains(&b'@') || rest.iter().any(|byte| matches!(byte, b'?' | b'#')) {
            return Err(UrlError::Secret);
        }
        let text =
            std::str::from_utf8(bytes).ok().filter(|_| !host.is_empty() && name.is_some_and(|name| !name.is_empty()));
        let text = text.ok_or_else(|| UrlError::NoObject(escaped(bytes)))?;
        Ok(Self { address: ServerAddress::Object(text.to_owned()), export: Vec::new(), tls: None })
    }

    fn parse(scheme: &[u8], rest: &[u8], shown: &str) -> Result<Self, UrlError> {
        let wrong = |kind: fn(String) -> UrlError| kind(shown.to_owned());
        let (before, query) = split_once(rest, b'?');
        let (authority, name) = split_once(before, b'/');
        let export = decoded(name.unwrap_or_default()).ok_or_else(|| wrong(UrlError::Escape))?;
        if export.len() > NAME_MAX {
            return Err(UrlError::LongName(export.len()));
        }
        // The part before the @ may be a secret, so no message has it.
        if authority.contains(&b'@') {
            return Err(UrlError::User);
        }
        let (scheme, has_tls) = match scheme.strip_prefix(b"nbds") {
            Some(rest) => ([b"nbd", rest].concat(), true),
            None => (scheme.to_vec(), false),
        };
        let mut tls = TlsSettings::default();
        let mut socket = None;
        for parameter in query.unwrap_or_default().split(|byte| *byte == b'&').filter(|text| !text.is_empty()) {
            match split_once(parameter, b'=') {
                (b"socket", Some(value)) => socket = Some(decoded(value).ok_or_else(|| wrong(UrlError::Escape))?),
                (b"tls-certificates", Some(value)) if has_tls => {
                    let directory = decoded(value).ok_or_else(|| wrong(UrlError::Escape))?;
                    tls.certificates = Some(PathBuf::from(OsString::from_vec(directory)));
                }
                (b"tls-hostname", Some(value)) if has_tls => {
                    let name = decoded(value).ok_or_else(|| wrong(UrlError::Escape))?;
                    tls.hostname = Some(String::from_utf8_lossy(&name).into_owned());
                }
                (name, _) => return Err(UrlError::Parameter { url: shown.to_owned(), name: escaped(name) }),
            }
        }
        let address = match scheme.as_slice() {
            b"nbd" => {
                if socket.is_some() {
                    return Err(UrlError::Parameter { url: shown.to_owned(), name: "socket".to_owned() });
                }
                let (host, port) = host_and_port(authority).ok_or_else(|| wrong(UrlError::Port))?;
                if host.is_empty() {
                    return Err(wrong(UrlError::NoHost));
                }
                ServerAddress::Tcp(host, port)
            }
            b"nbd+unix" => {
                if !authority.is_empty() {
                    return Err(wrong(UrlError::HostOfSocket));
                }
                let socket = socket.filter(|path| !path.is_empty()).ok_or_else(|| wrong(UrlError::NoSocket))?;
                ServerAddress::Unix(PathBuf::from(OsString::from_vec(socket)))
            }
            _ => return Err(wrong(UrlError::Scheme)),
        };
        Ok(Self { address, export, tls: has_tls.then_some(tls) })
    }

    /// The name of the server's host, as its certificate has it.
    pub(crate) fn host(&self) -> &str {
        match &self.address {
            ServerAddress::Tcp(host, _) => host,
            ServerAddress::Unix(_) | ServerAddress::Object(_) => "localhost",
        }
    }
}

/// The server and the export, for messages.
impl fmt::Display for NbdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            ServerAddress::Tcp(host, port) => write!(f, "{}:{port}", escaped(host.as_bytes())),
            ServerAddress::Unix(path) => f.write_str(&escaped(path.as_os_str().as_bytes())),
            ServerAddress::Object(url) => f.write_str(&escaped(url.as_bytes())),
        }
    }
}

/// Splits a URL at `://`: the scheme of NBD or of an object, and the rest.
fn scheme(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = bytes.windows(3).position(|three| three == b"://")?;
    let (scheme, rest) = bytes.split_at_checked(at)?;
    let is_nbd = |scheme: &[u8]| scheme == b"nbd" || scheme == b"nbds" || scheme.starts_with(b"nbd+");
    let is_known = is_nbd(scheme) || scheme.starts_with(b"nbds+") || OBJECT_SCHEMES.contains(&scheme);
    is_known.then_some((scheme, rest.get(3..)?))
}

/// Splits at the first `byte`, which is in neither part.
fn split_once(bytes: &[u8], byte: u8) -> (&[u8], Option<&[u8]>) {
    let mut parts = bytes.splitn(2, |other| *other == byte);
    (parts.next().unwrap_or_default(), parts.next())
}

/// The host and the port; `None` if the port is wrong. An IPv6 address is in brackets.
fn host_and_port(authority: &[u8]) -> Option<(String, u16)> {
    let text = std::str::from_utf8(authority).ok()?;
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            match port {
                "" => (host, None),
                _ => (host, Some(port.strip_prefix(':')?)),
            }
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = port.map_or(Some(PORT), |port| port.parse().ok().filter(|port| *port > 0))?;
    Some((host.to_owned(), port))
}

/// Replaces `%xx` by bytes; `None` if a `%` is followed by anything else, or for an encoded zero.
fn decoded(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.iter();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [*rest.next()?, *rest.next()?];
                let is_hex = digits.iter().all(u8::is_ascii_hexdigit);
                let digits = std::str::from_utf8(&digits).ok().filter(|_| is_hex)?;
                u8::from_str_radix(digits, 16).ok().filter(|byte| *byte != 0)?
            }
            other => *other,
        });
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<NbdUrl, UrlError> {
        NbdUrl::of_path(Path::new(text)).expect("meant as a URL")
    }

    #[test]
    fn urls_of_servers_and_sockets_are_parsed() {
        let tcp = |host: &str, port, export: &[u8]| NbdUrl {
            address: ServerAddress::Tcp(host.to_owned(), port),
            export: export.to_vec(),
            tls: None,
        };
        assert_eq!(parsed("nbd://host").unwrap(), tcp("host", 10809, b""));
        assert_eq!(parsed("nbd://host:1234/disk").unwrap(), tcp("host", 1234, b"disk"));
        assert_eq!(parsed("nbd://[::1]:7/a/b%20c").unwrap(), tcp("::1", 7, b"a/b c"));
        let unix = parsed("nbd+unix:///disk?socket=/run/a%3Fb").unwrap();
        assert_eq!(
            unix,
            NbdUrl { address: ServerAddress::Unix("/run/a?b".into()), export: b"disk".to_vec(), tls: None }
        );
        let tls = parsed("nbds://h/x?tls-certificates=/etc/pki&tls-hostname=other").unwrap();
        let settings = TlsSettings { certificates: Some("/etc/pki".into()), hostname: Some("other".to_owned()) };
        assert_eq!(tls, NbdUrl { tls: Some(settings), ..tcp("h", 10809, b"x") });
        assert_eq!(parsed("nbds+unix:///?socket=s").unwrap().tls, Some(TlsSettings::default()));
        assert_eq!(parsed("nbd+unix://?socket=s").unwrap().export, b"");
        for path in ["disk.img", "/dev/sda", "./nbd://x", "ftp://host/nbd", "nbd", "nbd:disk"] {
            assert!(!NbdUrl::is_meant(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn urls_of_objects_are_parsed_without_secrets() {
        for text in ["https://host:8443/a/disk.img", "http://host/x", "s3://bucket/key", "gs://b/k", "az://c/n"] {
            let url = parsed(text).unwrap();
            assert!(url.is_object() && url.to_string() == text, "{text}");
        }
        for text in ["https://user:secret@host/x", "https://host/x?signature=secret", "s3://b/k#secret"] {
            let error = parsed(text).unwrap_err();
            assert!(error == UrlError::Secret && !error.to_string().contains("secret"), "{text}");
        }
        for text in ["https://host", "https://host/", "s3:///key"] {
            assert_eq!(parsed(text), Err(UrlError::NoObject(text.to_owned())));
        }
    }

    #[test]
    fn wrong_urls_are_refused_and_secrets_are_not_shown() {
        use UrlError::*;
        let shown = |text: &str| text.to_owned();
        for (text, wanted) in [
            ("nbds+vsock://1/x", Scheme(shown("nbds+vsock://1/x"))),
            ("nbd+vsock://1/x", Scheme(shown("nbd+vsock://1/x"))),
            ("nbd:///x", NoHost(shown("nbd:///x"))),
            ("nbd://h:/x", Port(shown("nbd://h:/x"))),
            ("nbd://h:0/x", Port(shown("nbd://h:0/x"))),
            ("nbd://[::1/x", Port(shown("nbd://[::1/x"))),
            ("nbd+unix://h/x?socket=s", HostOfSocket(shown("nbd+unix://h/x?socket=s"))),
            ("nbd+unix:///x", NoSocket(shown("nbd+unix:///x"))),
            ("nbd+unix:///x?socket=", NoSocket(shown("nbd+unix:///x?socket="))),
            ("nbd://h/%0", Escape(shown("nbd://h/%0"))),
            ("nbd://h/%+1", Escape(shown("nbd://h/%+1"))),
            ("nbd://h/%00", Escape(shown("nbd://h/%00"))),
        ] {
            assert_eq!(parsed(text), Err(wanted), "{text}");
        }
        let secret = parsed("nbd://user:secret@host/x").unwrap_err();
        assert_eq!(secret, User);
        assert!(!secret.to_string().contains("secret"));
        for name in ["tls", "tls-certificates", "tls-hostname"] {
            let error = parsed(&format!("nbd://h/x?{name}=1"));
            assert!(matches!(&error, Err(Parameter { name: named, .. }) if named == name), "{error:?}");
        }
        assert_eq!(parsed(&format!("nbd://h/{}", "a".repeat(4097))), Err(LongName(4097)));
    }
}
