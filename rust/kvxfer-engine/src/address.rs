//! `host:port` in all the forms that people write.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Port of the directory when an address names none.
pub const DEFAULT_PORT: u16 = 8998;

/// A host (name or address) and a port.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct HostPort {
    /// Name, IPv4 or IPv6 address without brackets.
    pub host: String,
    /// Port; zero lets the system choose one to listen on.
    pub port: u16,
}

impl HostPort {
    /// Parses `host:port`, `1.2.3.4:5`, `[2001:db8::1]:30001`, a bare `::1` or a bare host; without a port,
    /// `default` is meant.
    ///
    /// # Errors
    /// A text that says what is wrong with the address.
    pub fn parse(text: &str, default: u16) -> Result<Self, String> {
        let text = text.trim();
        let bad = |why: &str| Err(format!("address {text:?}: {why}; write host:port or [ipv6]:port"));
        if text.is_empty() {
            return bad("it is empty");
        }
        let port_of = |p: &str| {
            p.parse::<u16>().map_err(|_| format!("address {text:?}: {p:?} is not a port (0 to 65535)"))
        };
        if let Some(rest) = text.strip_prefix('[') {
            let Some((host, after)) = rest.split_once(']') else { return bad("the bracket is not closed") };
            if host.parse::<Ipv6Addr>().is_err() {
                return bad("there is no IPv6 address between the brackets");
            }
            let port = match after {
                "" => default,
                p => match p.strip_prefix(':') {
                    Some(p) => port_of(p)?,
                    None => return bad("after the bracket only a port may follow"),
                },
            };
            return Ok(Self { host: host.to_owned(), port });
        }
        if text.parse::<Ipv6Addr>().is_ok() {
            return Ok(Self { host: text.to_owned(), port: default });
        }
        match text.split_once(':') {
            None => Ok(Self { host: text.to_owned(), port: default }),
            Some(("", _)) => bad("the host is empty"),
            Some((_, port)) if port.contains(':') => bad("it is neither an IPv6 address nor host:port"),
            Some((host, port)) => Ok(Self { host: host.to_owned(), port: port_of(port)? }),
        }
    }

    /// The socket address, if the host is an address and needs no name service.
    #[must_use]
    pub fn literal(&self) -> Option<SocketAddr> {
        self.host.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, self.port))
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_20_every_way_to_write_an_address() {
        for (text, host, port) in [
            ("[2001:db8::1]:30001", "2001:db8::1", 30001),
            ("[::1]:0", "::1", 0),
            ("::1", "::1", 8998),
            ("[::1]", "::1", 8998),
            ("10.0.0.1:8998", "10.0.0.1", 8998),
            ("10.0.0.1", "10.0.0.1", 8998),
            ("prefill-0.example:1", "prefill-0.example", 1),
            (" localhost ", "localhost", 8998),
        ] {
            let got = HostPort::parse(text, DEFAULT_PORT).unwrap();
            assert_eq!((got.host.as_str(), got.port), (host, port), "{text}");
            assert_eq!(HostPort::parse(&got.to_string(), 1).unwrap(), got);
        }
        for text in ["", ":80", "[::1", "[::1]80", "[1.2.3.4]:80", "a:b", "a:70000", "a:b:c", "1::2::3"] {
            let err = HostPort::parse(text, DEFAULT_PORT).unwrap_err();
            assert!(err.contains("address"), "{text}: {err}");
        }
    }
}
